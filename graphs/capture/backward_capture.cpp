#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/autograd.h>

#include "base/site.h"
#include "graphs/capture/added_gradients.h"
#include "graphs/capture/call_state_guard.h"
#include "graphs/capture/capture_guard.h"
#include "graphs/capture/chain_capture.h"
#include "graphs/capture/given_gradients.h"
#include "graphs/capture/gradient_routes.h"
#include "graphs/capture/graph_check.h"
#include "graphs/capture/node_check.h"
#include "graphs/capture/node_naming.h"
#include "graphs/capture/not_owning.h"
#include "graphs/capture/pass_hooks.h"
#include "offload/nested_backward.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

bool wants_gradient(const StaticInput& input, const at::Tensor& leaf) {
  return leaf.defined() && leaf.requires_grad() && !input.same_as_earlier;
}

/// Parameters whose gradients are added into `.grad`.
struct Accumulated {
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> targets;
};

Accumulated accumulated_of(const Layer& layer) {
  Accumulated all;
  for (const LayerParameter& parameter : layer.parameters) {
    if (parameter.policy == GradientPolicy::accumulated) {
      all.parameters.push_back(parameter.tensor);
      all.targets.push_back(parameter.grad);
    }
  }
  return all;
}

}  // namespace

void ChainCapture::capture_backward(std::size_t index) {
  Layer& layer = chain_.layers_[index];
  Live& live = live_[index];
  if (!layer.has_backward) {
    return;
  }
  const std::size_t place = chain_.copies_.place_of_backward(index);
  use_.comes_to(place);
  release(place);
  prepare_seeds(index);
  const Site site(Activity::capture_backward, layer.spec.scope->site);
  std::vector<at::Tensor> roots;
  std::vector<at::Tensor> seeds;
  for (const auto i : c10::irange(live.outputs.size())) {
    if (layer.outputs[i].requires_grad) {
      roots.push_back(live.outputs[i]);
      seeds.push_back(layer.outputs[i].seed);
    }
  }
  std::vector<at::Tensor> targets;
  for (const auto i : c10::irange(live.leaves.size())) {
    if (wants_gradient(layer.inputs[i], live.leaves[i])) {
      targets.push_back(live.leaves[i]);
    }
  }
  for (const LayerParameter& parameter : layer.parameters) {
    targets.push_back(parameter.tensor);
  }
  learn_routes(layer, live, targets);

  std::vector<at::Tensor> grads;
  std::optional<AddedGradients> added;
  if (layer.accumulates) {
    Accumulated accumulated = accumulated_of(layer);
    added.emplace(std::move(accumulated.parameters), accumulated.targets);
    for (const at::Tensor& target : accumulated.targets) {
      reads_.made(target);
    }
  }
  const PassHooks hooks(layer.spec.hooks.get(), reads_.met());
  hooks.before_backward();
  check_hooked_weights(index);
  use_.capture_begins();
  CaptureGuard capture(runtime_, capture_, *chain_.pool_, layer.spec.generators);
  allocate_targets(index);
  if (!targets.empty()) {
    const RecorderGuard no_recorder(nullptr);
    const NestedBackwardRefusal no_nested;
    const BackwardStateGuard state(layer.spec.state);
    const OperatorObserverGuard observer = reads_.watch();
    NodeNaming naming(runtime_, capture_, layer.backward_names, *layer.spec.scope, live.scopes);
    const OperatorObserverGuard names = naming.watch();
    grads = torch::autograd::grad(roots, targets, seeds, chain_.options_.retain_graph_in_backward(),
                                  /*create_graph=*/false, /*allow_unused=*/true);
    names.rethrow();
    observer.rethrow();
  }
  hold_reads(layer);
  take_gradients(layer, live, grads, added ? &*added : nullptr);
  added.reset();
  runtime_.record(layer.backward_done, capture_);
  record_caller_event();
  layer.backward = capture.end();
  use_.capture_ended();
  hooks.after_backward();
  const std::string what = chain_.describe(index) + ", backward";
  const std::vector<GraphNode> nodes = runtime_.nodes(layer.backward);
  check_graph_events(nodes, layer.backward_names, layer.backward_done, {}, what);
  check_nodes(nodes, layer.backward_names, layer.copies.captured, what);
  check_copy_ends(layer.copies.captured, CopyEnds::targets, what);
  finish_backward(index);
}

StaticInput* ChainCapture::giver_of_seed(std::size_t index, const StaticOutput& output) {
  if (output.readers.size() != 1 || output.readers[0].layer != index + 1) {
    return nullptr;
  }
  const Link& reader = output.readers[0];
  const std::vector<at::Tensor>& grads = live_[reader.layer].grad_inputs;
  if (grads.size() <= reader.index || !grads[reader.index].defined() || !grads[reader.index].is_contiguous()) {
    return nullptr;
  }
  // A sum's backward gives one tensor as the gradient of both its inputs. As two seeds it would be wrong wherever one of the
  // outputs is read elsewhere too: that output's gradient is another one then, and would be written over both.
  const auto& outputs = chain_.layers_[index].outputs;
  const bool taken = std::any_of(outputs.begin(), outputs.end(), [&](const StaticOutput& other) {
    return other.seed_from && at::get_overlap_status(other.seed, grads[reader.index]) != at::MemOverlapStatus::No;
  });
  return taken ? nullptr : &chain_.layers_[reader.layer].inputs[reader.index];
}

void ChainCapture::prepare_seeds(std::size_t index) {
  const at::NoGradGuard no_grad;
  for (StaticOutput& output : chain_.layers_[index].outputs) {
    if (!output.requires_grad) {
      continue;
    }
    if (StaticInput* giver = giver_of_seed(index, output); giver != nullptr) {
      output.seed_from = output.readers[0];
      output.seed = live_[output.seed_from->layer].grad_inputs[output.seed_from->index];
      giver->grad_is_seed = true;
    } else {
      output.seed = at::zeros_like(output.tensor, at::MemoryFormat::Contiguous);
      reads_.made(output.seed);
    }
  }
}

void ChainCapture::learn_routes(Layer& layer, const Live& live, const std::vector<at::Tensor>& targets) {
  std::vector<at::Tensor> roots = live.outputs;
  for (const auto i : c10::irange(roots.size())) {
    if (!layer.outputs[i].requires_grad) {
      roots[i] = at::Tensor();
    }
  }
  const std::vector<OutputSet> routes = gradient_routes(roots, targets);
  std::size_t next = 0;
  for (const auto i : c10::irange(layer.inputs.size())) {
    if (wants_gradient(layer.inputs[i], live.leaves[i])) {
      layer.inputs[i].outputs = routes[next++];
    }
  }
  for (LayerParameter& parameter : layer.parameters) {
    parameter.outputs = routes[next++];
  }
}

// First of all in the capture: what came before it may have used that memory, it and what follows may not.
void ChainCapture::allocate_targets(std::size_t index) {
  const std::size_t place = chain_.copies_.place_of_backward(index);
  for (std::size_t i = index + 1; i-- > 0;) {
    LayerCopies& copies = chain_.layers_[i].copies;
    if (!copies.allocated && copies.returns_at <= place) {
      const Site site(Activity::reload, chain_.layers_[i].spec.scope->site);
      copies.allocated = true;
      copies.returns_at = place;
      resources_.offload->allocate_targets(copies.captured);
      for (const auto& saved : copies.captured.storages) {
        reads_.made(saved->device);
      }
    }
  }
}

void ChainCapture::take_gradients(Layer& layer, Live& live, std::vector<at::Tensor>& grads,
                                  const AddedGradients* added) {
  std::size_t next = 0;
  for (const auto i : c10::irange(live.leaves.size())) {
    live.grad_inputs.push_back(wants_gradient(layer.inputs[i], live.leaves[i]) ? grads[next++] : at::Tensor());
  }
  std::size_t next_added = 0;
  for (LayerParameter& parameter : layer.parameters) {
    const bool accumulated = parameter.policy == GradientPolicy::accumulated;
    at::Tensor grad = std::move(grads[next++]);
    if (accumulated ? !added->has(next_added++) : !grad.defined()) {
      throw CaptureError(
          "a parameter got a gradient in the sizing pass, but gets none in the capture; let the callable do the same "
          "work each time");
    }
    if (!accumulated) {
      parameter.grad = std::move(grad);
    }
  }
  grads.clear();
  for (LayerParameter& parameter : layer.parameters) {
    if (parameter.policy == GradientPolicy::owned) {
      give_memory(parameter);
      layer.owns_gradients = layer.owns_gradients || parameter.memory;
    }
  }
}

void ChainCapture::finish_backward(std::size_t index) {
  Layer& layer = chain_.layers_[index];
  Live& live = live_[index];
  for (const auto i : c10::irange(layer.inputs.size())) {
    const at::Tensor& grad = live.grad_inputs[i];
    layer.inputs[i].grad = grad.defined() ? not_owning(grad) : grad;
  }
  for (LayerParameter& parameter : layer.parameters) {
    if (parameter.policy != GradientPolicy::accumulated) {
      parameter.grad = not_owning(parameter.grad);
    }
  }
  // What later captures may use again from here on: this layer's saved tensors and reloaded copies, and the input gradients
  // of the layer above, which this backward has read.
  live.recorder.reset();
  if (!chain_.options_.retain_graph_in_backward()) {
    live.outputs.clear();
    live.leaves.clear();
    CaptureOffload::release(layer.copies.captured);
  }
  if (index == 0 && !chain_.memory_->shared()) {
    give_input_gradients(layer, live.grad_inputs);
  }
  if (index + 1 < specs_.size()) {
    live_[index + 1].grad_inputs.clear();
    // A seed that the layer above gives no longer keeps that memory from being used again.
    for (StaticOutput& output : layer.outputs) {
      if (output.seed_from) {
        output.seed = not_owning(output.seed);
      }
    }
  }
}

}  // namespace sidestream
