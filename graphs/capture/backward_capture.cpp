#include <algorithm>
#include <optional>
#include <vector>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/autograd.h>

#include "base/site.h"
#include "graphs/capture/node_naming.h"
#include "graphs/capture/sequence_capture.h"
#include "graphs/capture/warmup.h"
#include "graphs/gradients/call_gradients.h"
#include "graphs/gradients/gradient_leaves.h"
#include "graphs/guards/call_spec.h"
#include "graphs/outputs/storage_holders.h"
#include "memory/storage_view.h"
#include "offload/nested_backward.h"
#include "runtime/capture_guard.h"
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

Accumulated accumulated_of(const CapturedCall& call) {
  Accumulated all;
  for (const CallParameter& parameter : call.parameters) {
    if (parameter.policy == GradientPolicy::accumulated) {
      all.parameters.push_back(parameter.tensor);
      all.targets.push_back(parameter.grad);
    }
  }
  return all;
}

/// After the hooks of a call have run for its backward. Throws: CaptureError if its weights lie elsewhere than for its forward.
void check_hooked_weights(const CapturedSequence& sequence, std::size_t index) {
  if (sequence.calls[index].spec.hooks != nullptr && sequence.change(index).stale()) {
    throw CaptureError("its capture-time hooks placed weights at other addresses for backward than for forward (" +
                       sequence.difference(index) +
                       "). A replay reads the same addresses in forward and backward; let before_forward and "
                       "before_backward place the weights in the same memory");
  }
}

/// The input of the next call that alone reads `output` of call `index`, if the gradient it gets there can be handed on as
/// the output's seed without a copy, and is no other output's seed; else null.
StaticInput* giver_of_seed(SequenceCapture& capture, std::size_t index, const StaticOutput& output) {
  if (output.readers.size() != 1 ||
      capture.order.backward_index(output.readers[0].call) + 1 != capture.order.backward_index(index)) {
    return nullptr;
  }
  const Link& reader = output.readers[0];
  const std::vector<at::Tensor>& grads = capture.live[reader.call].grad_inputs;
  if (grads.size() <= reader.index || !grads[reader.index].defined() || !grads[reader.index].is_contiguous()) {
    return nullptr;
  }
  // A reader with delayed parameters may keep it for their gradients, and code between two calls may write the seed before these come.
  if (capture.sequence.calls[reader.call].delays) {
    await_end_of_backward(capture.runtime.device());
    const at::Tensor& grad = grads[reader.index];
    if (others_hold(grad, 1) || others_hold(grad.storage(), 1)) {
      return nullptr;
    }
  }
  // A sum's backward gives one tensor as the gradient of both its inputs. As two seeds it would be wrong wherever one of the
  // outputs is read elsewhere too: that output's gradient is another one then, and would be written over both.
  const auto& outputs = capture.sequence.calls[index].outputs;
  const bool taken = std::any_of(outputs.begin(), outputs.end(), [&](const StaticOutput& other) {
    return other.seed_from && at::get_overlap_status(other.seed, grads[reader.index]) != at::MemOverlapStatus::No;
  });
  return taken ? nullptr : &capture.sequence.calls[reader.call].inputs[reader.index];
}

void prepare_seeds(SequenceCapture& capture, std::size_t index) {
  const at::NoGradGuard no_grad;
  for (StaticOutput& output : capture.sequence.calls[index].outputs) {
    if (!output.requires_grad) {
      continue;
    }
    if (StaticInput* giver = giver_of_seed(capture, index, output); giver != nullptr) {
      output.seed_from = output.readers[0];
      output.seed = capture.live[output.seed_from->call].grad_inputs[output.seed_from->index];
      giver->grad_is_seed = true;
    } else if (capture.order.interleaves()) {
      output.seed_in_pool = true;
    } else {
      output.seed = at::zeros_like(output.tensor, at::MemoryFormat::Contiguous);
      capture.reads.made(output.seed);
    }
  }
}

/// Inside of the capture: makes the seeds that are memory of the pool. Returns all seeds.
std::vector<at::Tensor> make_seeds_in_pool(SequenceCapture& capture, std::size_t index) {
  std::vector<at::Tensor> seeds;
  for (StaticOutput& output : capture.sequence.calls[index].outputs) {
    if (output.seed_in_pool) {
      output.seed = at::empty(output.tensor.sizes(), output.tensor.options());
      capture.reads.made(output.seed);
    }
    if (output.requires_grad) {
      seeds.push_back(output.seed);
    }
  }
  return seeds;
}

/// After the capture: later graphs may use the memory of the pool that held what replays write for this call.
void release_inputs_and_seeds(CapturedCall& call) {
  for (StaticOutput& output : call.outputs) {
    if (output.seed_in_pool) {
      output.seed = not_owning(output.seed);
    }
  }
  for (StaticInput& input : call.inputs) {
    if (input.in_pool) {
      input.tensor = not_owning(input.tensor);
    }
  }
  for (const auto i : c10::irange(call.inputs.size())) {
    if (call.inputs[i].same_as_earlier) {
      call.inputs[i].tensor = call.inputs[call.spec.inputs[i].aliases->same_as].tensor;
    }
  }
}

/// Which outputs lead to the gradients of `targets`: of inputs that require one, then of parameters.
void learn_routes(CapturedCall& call, const SequenceCapture::Live& live, const std::vector<at::Tensor>& targets) {
  std::vector<at::Tensor> roots = live.outputs;
  for (const auto i : c10::irange(roots.size())) {
    if (!call.outputs[i].requires_grad) {
      roots[i] = at::Tensor();
    }
  }
  const std::vector<OutputSet> routes = gradient_routes(roots, targets);
  std::size_t next = 0;
  for (const auto i : c10::irange(call.inputs.size())) {
    if (wants_gradient(call.inputs[i], live.leaves[i])) {
      call.inputs[i].outputs = routes[next++];
    }
  }
  for (CallParameter& parameter : call.parameters) {
    parameter.outputs = routes[next++];
  }
}

/// Takes the gradients of inputs, and of parameters that were not `added` into `.grad`. `added` may be null.
void take_gradients(CapturedCall& call, SequenceCapture::Live& live, std::vector<at::Tensor>& grads,
                    const AddedGradients* added) {
  std::size_t next = 0;
  for (const auto i : c10::irange(live.leaves.size())) {
    live.grad_inputs.push_back(wants_gradient(call.inputs[i], live.leaves[i]) ? grads[next++] : at::Tensor());
  }
  std::size_t next_added = 0;
  for (CallParameter& parameter : call.parameters) {
    const bool accumulated = parameter.policy == GradientPolicy::accumulated;
    at::Tensor grad = std::move(grads[next++]);
    if (parameter.policy == GradientPolicy::delayed) {  // run_first_part has checked it
      parameter.grad = grad.defined() ? live.computed.emplace_back(std::move(grad)) : at::Tensor();
      continue;
    }
    if (accumulated) {
      require_gradient(parameter, added->has(next_added++));
    } else {
      require_dense_gradient(parameter, grad);
      parameter.grad = std::move(grad);
    }
  }
  grads.clear();
  for (CallParameter& parameter : call.parameters) {
    if (parameter.policy == GradientPolicy::owned) {
      give_memory(parameter);
      call.owns_gradients = call.owns_gradients || parameter.memory;
    }
  }
}

void finish_backward(SequenceCapture& capture, std::size_t index) {
  CapturedCall& call = capture.sequence.calls[index];
  SequenceCapture::Live& live = capture.live[index];
  for (const auto i : c10::irange(call.inputs.size())) {
    const at::Tensor& grad = live.grad_inputs[i];
    call.inputs[i].grad = grad.defined() ? not_owning(grad) : grad;
  }
  for (CallParameter& parameter : call.parameters) {
    if (parameter.policy != GradientPolicy::accumulated && parameter.policy != GradientPolicy::delayed) {
      parameter.grad = not_owning(parameter.grad);
    }
  }
  // Later captures may use this memory again: this call's saved tensors and reloaded copies, and the input gradients
  // of the call above, which this backward has read.
  live.recorder.reset();
  if (!capture.sequence.options.retain_graph_in_backward()) {
    live.outputs.clear();
    live.leaves.clear();
    release_inputs_and_seeds(call);
    if (call.delays) {
      CaptureOffload::release_unused(call.copies.captured);
    } else {
      CaptureOffload::release(call.copies.captured);
    }
  }
  const std::size_t graph_index = capture.order.backward_index(index);
  if (graph_index + 1 == capture.order.size() && !capture.sequence.memory->shared()) {
    call.owns_gradients = give_input_gradients(call.inputs, live.grad_inputs) || call.owns_gradients;
  }
  if (capture.order.is_backward(graph_index - 1)) {
    drop_gradients_of(capture, graph_index - 1);
    // A seed that the call above gives no longer keeps that memory from being used again.
    for (StaticOutput& output : call.outputs) {
      if (output.seed_from) {
        output.seed = not_owning(output.seed);
      }
    }
  }
}

}  // namespace

void allocate_targets(SequenceCapture& capture, CapturedCall::Copies& copies, bool for_weights) {
  capture.resources.offload->allocate_targets(copies.captured, for_weights);
  for (const auto& saved : copies.captured.storages) {
    if (saved->for_weights == for_weights) {
      capture.reads.made(saved->device);
    }
  }
}

void allocate_targets(SequenceCapture& capture, std::size_t graph_index) {
  for (const std::size_t i : capture.order.by_backward()) {
    CapturedCall::Copies& copies = capture.sequence.calls[i].copies;
    if (!copies.allocated && copies.reload_at <= graph_index && capture.order.forward_index(i) < graph_index &&
        capture.order.backward_index(i) >= graph_index) {
      const Site site(Activity::reload, capture.sequence.calls[i].spec.scope->site);
      copies.allocated = true;
      copies.reload_at = graph_index;
      allocate_targets(capture, copies, /*for_weights=*/false);
    }
  }
}

void drop_gradients_of(SequenceCapture& capture, std::size_t graph_index) {
  if (capture.order.is_backward(graph_index)) {
    capture.live[capture.order.run_at(graph_index)].grad_inputs.clear();
  }
}

void capture_backward(SequenceCapture& capture, std::size_t index) {
  CapturedCall& call = capture.sequence.calls[index];
  SequenceCapture::Live& live = capture.live[index];
  if (!call.has_backward) {
    return;
  }
  const std::size_t graph_index = capture.order.backward_index(index);
  capture.use.comes_to(graph_index);
  capture.release_before(graph_index);
  prepare_seeds(capture, index);
  const Site site(Activity::capture_backward, call.spec.scope->site);
  std::vector<at::Tensor> roots;
  for (const auto i : c10::irange(live.outputs.size())) {
    if (call.outputs[i].requires_grad) {
      roots.push_back(live.outputs[i]);
    }
  }
  std::vector<at::Tensor> targets;
  for (const auto i : c10::irange(live.leaves.size())) {
    if (wants_gradient(call.inputs[i], live.leaves[i])) {
      targets.push_back(live.leaves[i]);
    }
  }
  for (const CallParameter& parameter : call.parameters) {
    targets.push_back(parameter.tensor);
  }
  learn_routes(call, live, targets);

  std::vector<at::Tensor> grads;
  std::optional<AddedGradients> added;
  if (call.accumulates) {
    Accumulated accumulated = accumulated_of(call);
    added.emplace(std::move(accumulated.parameters), accumulated.targets);
    for (const at::Tensor& target : accumulated.targets) {
      capture.reads.made(target);
    }
  }
  const PassHooks hooks(call.spec.hooks.get(), capture.reads.met());
  hooks.before_backward();
  check_hooked_weights(capture.sequence, index);
  capture.use.capture_begins();
  CaptureGuard guard(capture.runtime, capture.stream, *capture.sequence.pool, call.spec.generators);
  std::vector<at::Tensor> seeds = make_seeds_in_pool(capture, index);
  allocate_targets(capture, graph_index);
  if (!targets.empty()) {
    const RecorderGuard no_recorder(nullptr);
    const NestedBackwardRefusal no_nested;
    const CallStateGuard state(call.spec.state, Direction::backward);
    const OperatorObserverGuard observer = capture.reads.watch();
    NodeNaming naming(capture.runtime, capture.stream, call.backward.names, *call.spec.scope, live.scopes);
    const OperatorObserverGuard names = naming.watch();
    grads = call.delays
                ? run_first_part(capture, index, roots, targets, seeds)
                : torch::autograd::grad(roots, targets, seeds, capture.sequence.options.retain_graph_in_backward(),
                                        /*create_graph=*/false, /*allow_unused=*/true);
    names.rethrow();
    observer.rethrow();
  }
  // Without this wait, autograd's thread may still hold gradients. It may also free what its last node saved after the next capture has
  // begun.
  await_end_of_backward(capture.runtime.device());
  hold_reads(capture.reads, call);
  take_gradients(call, live, grads, added ? &*added : nullptr);
  added.reset();
  capture.runtime.record(call.backward.done, capture.stream);
  capture.record_caller_event();
  call.backward.graph = guard.end();
  capture.use.capture_ended();
  hooks.after_backward();
  check_captured(capture, index, Direction::backward);
  finish_backward(capture, index);
}

}  // namespace sidestream
