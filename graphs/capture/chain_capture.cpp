#include "graphs/capture/chain_capture.h"

#include <algorithm>
#include <typeinfo>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/autograd.h>

#include "base/site.h"
#include "graphs/capture/body_hooks.h"
#include "graphs/capture/call_state_guard.h"
#include "graphs/capture/captured_outputs.h"
#include "graphs/capture/gradient_routes.h"
#include "graphs/capture/graph_check.h"
#include "graphs/replay/graph_event_state.h"
#include "observe/held_draws.h"
#include "offload/nested_backward.h"
#include "runtime/capture_turn.h"
#include "runtime/draw_order.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// A tensor over the same memory that keeps nothing alive: the address is the graph's, its pool keeps it.
at::Tensor not_owning(const at::Tensor& tensor) {
  const c10::Storage& owner = tensor.storage();
  return StorageView::capture(tensor).restore(c10::Storage(c10::Storage::use_byte_size_t(), owner.nbytes(),
                                                           c10::DataPtr(owner.mutable_data(), owner.device()), nullptr,
                                                           /*resizable=*/false));
}

/// Ends a capture that an exception left open.
class CaptureGuard {
 public:
  CaptureGuard(Runtime& runtime, c10::Stream stream, const MemoryPool& pool) : runtime_(runtime), stream_(stream) {
    runtime_.begin_capture(stream_, pool);
  }
  CaptureGuard(const CaptureGuard&) = delete;
  CaptureGuard& operator=(const CaptureGuard&) = delete;
  ~CaptureGuard() {
    if (open_) {
      runtime_.abandon_capture(stream_);
    }
  }
  [[nodiscard]] Graph end() {
    open_ = false;
    return runtime_.end_capture(stream_);
  }

 private:
  Runtime& runtime_;
  c10::Stream stream_;
  bool open_ = true;
};

/// What the device or the rules of capture refuse says where that was; what the user's code throws is left as it is.
template <class Part>
void naming(const std::string& where, const Part& part) {
  const auto named = [&](const Error& error) {
    const std::string text = error.what();
    return text.find(where) == std::string::npos ? where + ": " + text : text;
  };
  try {
    part();
  } catch (const CaptureError& error) {
    if (typeid(error) != typeid(CaptureError)) {
      throw;
    }
    throw CaptureError(named(error));
  } catch (const DeviceError& error) {
    if (typeid(error) != typeid(DeviceError)) {
      throw;
    }
    throw DeviceError(named(error), error.status());
  }
}

bool wants_gradient(const StaticInput& input, const at::Tensor& leaf) {
  return leaf.defined() && leaf.requires_grad() && !input.same_as_earlier;
}

std::vector<at::Tensor> parameters_of(const Layer& layer) {
  std::vector<at::Tensor> tensors;
  for (const LayerParameter& parameter : layer.parameters) {
    tensors.push_back(parameter.tensor);
  }
  return tensors;
}

}  // namespace

void ChainCapture::run() {
  runtime_.synchronize_device();
  {
    const StreamGuard on_capture(runtime_, capture_);
    sizings_ =
        warm_up(specs_, chain_.options_, runtime_, *resources_.tree, *resources_.exclusions, resources_.progress);
  }
  runtime_.synchronize_device();
  make_plan_and_pin();
  prepare_layers();
  runtime_.release_cached_memory();
  {
    // Until the last backward is captured: it looks for its parameters by the accumulators that the forwards made.
    const BareLeaves bare(all_parameters());
    const StreamGuard on_capture(runtime_, capture_);
    for (const auto i : c10::irange(specs_.size())) {
      say(ProgressPhase::capture_forward, i, i);
      naming(chain_.describe(i) + ", forward", [&] { capture_forward(i); });
    }
    for (std::size_t i = specs_.size(); i-- > 0;) {
      say(ProgressPhase::capture_backward, specs_.size() - 1 - i, i);
      naming(chain_.describe(i) + ", backward", [&] { capture_backward(i); });
    }
  }
  for (Live& live : live_) {
    live = {};
  }
  resources_.exclusions->remove_static_inputs();
  runtime_.synchronize_device();
  fill_kept_tensors();
  runtime_.release_cached_memory();
}

void ChainCapture::say(ProgressPhase phase, std::size_t index, std::size_t layer) const {
  if (resources_.progress) {
    resources_.progress({phase, index, specs_.size(), specs_[layer].name});
  }
}

void ChainCapture::record_caller_event() {
  if (const auto& event = chain_.options_.cuda_graph_event(); event != nullptr) {
    runtime_.record(GraphEventState::event_of(*event), capture_);
  }
}

void ChainCapture::hold_reads(Layer& layer) {
  for (const at::Tensor& tensor : reads_.give_to(layer)) {
    watch(layer, tensor);
  }
}

void ChainCapture::capture_forward(std::size_t index) {
  Layer& layer = chain_.layers_[index];
  Live& live = live_[index];
  const std::size_t side_streams = chain_.streams_.size();
  if (index >= side_streams) {
    // This graph replays behind all of graph index-K on one stream: what that graph's copies read is free from here on.
    CaptureOffload::release(chain_.layers_[index - side_streams].offloaded);
  }
  const Site site(Activity::capture_forward, layer.spec.scope->site);
  for (const auto i : c10::irange(layer.inputs.size())) {
    StaticInput& input = layer.inputs[i];
    if (input.same_as_earlier) {
      const StaticInput& first = layer.inputs[layer.spec.inputs[i].aliases->same_as];
      input.tensor = first.tensor;
      input.from = first.from;
      input.requires_grad = first.requires_grad;
    } else if (input.from) {
      link(input, {index, i});
    }
    if (input.same_as_earlier) {
      live.leaves.push_back(live.leaves[layer.spec.inputs[i].aliases->same_as]);
    } else {
      live.leaves.push_back(input.tensor.defined() ? input.tensor.detach().requires_grad_(input.requires_grad)
                                                   : input.tensor);
    }
    if (input.tensor.defined()) {
      resources_.exclusions->add_static_input(input.tensor);
    }
  }
  live.recorder =
      std::make_unique<Recorder>(*resources_.tree, *resources_.exclusions, resources_.offload, &live.planned);
  std::vector<at::Tensor> arguments;
  detail::TensorBuffer outputs;
  SavedStorages saved(*live.recorder);
  resources_.offload->begin_forward(layer.offloaded);
  CaptureGuard capture(runtime_, capture_, chain_.pool_);
  {
    const OperatorObserverGuard observer = reads_.watch();
    {
      const RecorderGuard recording(live.recorder.get());
      RecorderScope scope(*live.recorder, layer.spec.scope);
      {
        const ForwardStateGuard state(layer.spec.state);
        arguments = arguments_of(layer.spec, live.leaves);
        const SavedTensorGuard noting(&saved);
        layer.spec.body(arguments.data(), outputs);
      }
      scope.end();
    }
    observer.rethrow();
  }
  hold_reads(layer);
  reads_.forward_ended(index);
  live.recorder->finish();
  const Recorder::Counts counts = live.recorder->counts();
  layer.unplanned_bytes = counts.unplanned_bytes;
  layer.refused_bytes = counts.refused_bytes;
  runtime_.record(layer.forward_done, capture_);
  record_caller_event();
  resources_.offload->join_forward();
  runtime_.record(layer.forward_copies_done, capture_);
  layer.forward = capture.end();
  check_graph_events(runtime_, layer.forward, layer.forward_done, layer.forward_copies_done,
                     chain_.describe(index) + ", forward");
  live.outputs.assign(outputs.begin(), outputs.end());
  learn_outputs(layer, arguments, outputs, saved, *resources_.exclusions);
  if (has_hooks_of_body(outputs)) {
    chain_.plan_.notes.push_back(
        chain_.describe(index) +
        " registers gradient hooks inside: what they do beside computing happens at the capture only");
  }
}

void ChainCapture::link(StaticInput& input, const Link& reader) {
  using Kind = StaticOutput::Kind;
  for (;;) {
    Layer& giver = chain_.layers_[input.from->layer];
    StaticOutput& output = giver.outputs[input.from->index];
    if (output.kind == Kind::earlier_output) {
      input.from->index = output.of;
    } else if (output.kind == Kind::input && giver.inputs[output.of].from) {
      input.from = giver.inputs[output.of].from;
    } else if (output.kind == Kind::none || output.kind == Kind::made) {
      output.readers.push_back(reader);
      input.tensor = output.tensor;
      input.requires_grad = output.requires_grad;
      return;
    } else {  // what a replay is given there is the caller's own, wherever it lies
      const at::NoGradGuard no_grad;
      const bool of_input = output.kind == Kind::input || output.kind == Kind::view_of_input;
      input.requires_grad = of_input ? giver.inputs[output.of].requires_grad : output.owner.requires_grad();
      input.tensor = at::empty_like(output.tensor).copy_(output.tensor);
      reads_.made(input.tensor);
      input.from.reset();
      return;
    }
  }
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

void ChainCapture::capture_backward(std::size_t index) {
  Layer& layer = chain_.layers_[index];
  Live& live = live_[index];
  if (!layer.has_backward) {
    return;
  }
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
  const std::vector<at::Tensor> parameters = parameters_of(layer);
  targets.insert(targets.end(), parameters.begin(), parameters.end());
  learn_routes(layer, live, targets);

  std::vector<at::Tensor> grads;
  CaptureGuard capture(runtime_, capture_, chain_.pool_);
  prefetch(index);
  if (!targets.empty()) {
    const RecorderGuard no_recorder(nullptr);
    const NestedBackwardRefusal no_nested;
    const BackwardStateGuard state(layer.spec.state);
    const OperatorObserverGuard observer = reads_.watch();
    grads = torch::autograd::grad(roots, targets, seeds, chain_.options_.retain_graph_in_backward(),
                                  /*create_graph=*/false, /*allow_unused=*/true);
    observer.rethrow();
  }
  hold_reads(layer);
  take_gradients(layer, live, grads);
  runtime_.record(layer.backward_done, capture_);
  record_caller_event();
  resources_.offload->join_prefetch();
  runtime_.record(layer.backward_copies_done, capture_);
  layer.backward = capture.end();
  check_graph_events(runtime_, layer.backward, layer.backward_done, layer.backward_copies_done,
                     chain_.describe(index) + ", backward");
  finish_backward(index);
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

void ChainCapture::prefetch(std::size_t index) {
  Layer& layer = chain_.layers_[index];
  if (layer.reload_targets.empty() && !layer.offloaded.empty()) {  // no backward above brings it back
    resources_.offload->prefetch(layer.offloaded, layer.spec.scope->site);
    resources_.offload->join_prefetch();
    for (const auto& saved : layer.offloaded) {
      reads_.made(saved->device);
    }
  }
  const auto next = std::find_if(chain_.layers_.rend() - static_cast<std::ptrdiff_t>(index), chain_.layers_.rend(),
                                 [](const Layer& below) { return below.has_backward; });
  if (next == chain_.layers_.rend()) {
    return;
  }
  layer.reloads = chain_.layers_.rend() - next - 1;
  resources_.offload->prefetch(next->offloaded, next->spec.scope->site);
  for (const auto& saved : next->offloaded) {
    reads_.made(saved->device);
    next->reload_targets.push_back(saved->device.mutable_data());
  }
}

void ChainCapture::take_gradients(Layer& layer, Live& live, std::vector<at::Tensor>& grads) {
  const at::NoGradGuard no_grad;
  std::size_t next = 0;
  for (const auto i : c10::irange(live.leaves.size())) {
    live.grad_inputs.push_back(wants_gradient(layer.inputs[i], live.leaves[i]) ? grads[next++] : at::Tensor());
  }
  for (LayerParameter& parameter : layer.parameters) {
    at::Tensor& grad = grads[next++];
    if (!grad.defined()) {
      throw CaptureError(
          "a parameter that got a gradient in the sizing pass gets none in the capture: the callable does " +
          std::string("not do the same each time"));
    }
    if (chain_.options_.accumulate_in_graph()) {
      parameter.grad.add_(grad);
    } else {
      parameter.grad = grad;
    }
  }
  grads.clear();
}

void ChainCapture::finish_backward(std::size_t index) {
  Layer& layer = chain_.layers_[index];
  Live& live = live_[index];
  for (const auto i : c10::irange(layer.inputs.size())) {
    const at::Tensor& grad = live.grad_inputs[i];
    layer.inputs[i].grad = grad.defined() ? not_owning(grad) : grad;
  }
  if (!chain_.options_.accumulate_in_graph()) {
    for (LayerParameter& parameter : layer.parameters) {
      parameter.grad = not_owning(parameter.grad);
    }
  }
  // What later captures may use again from here on: this layer's saved tensors and reloaded copies, and the input gradients
  // of the layer above, which this backward has read.
  live.recorder.reset();
  if (!chain_.options_.retain_graph_in_backward()) {
    live.outputs.clear();
    live.leaves.clear();
    CaptureOffload::release(layer.offloaded);
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

std::shared_ptr<Chain> ChainCapture::make_chain(const GraphResources& resources, std::vector<LayerSpec> specs,
                                                const GraphOptions& options) {
  const c10::Device device = resources.runtime->device();
  resources.runtime->check_settings(/*graphs=*/true);
  const CaptureTurn turn(device);
  const HeldDraws held(device);
  const DrawOrder::Capturing in_order(DrawOrder::of(device), *resources.runtime, *resources.capture_stream);
  std::shared_ptr<Chain> chain(new Chain(resources, options));
  ChainCapture capture(*chain, resources, std::move(specs));
  resources.owned_gradients->release_accumulators();
  try {
    capture.run();
  } catch (...) {
    resources.owned_gradients->hold_accumulators();
    resources.exclusions->remove_static_inputs();
    resources.offload->abandon();
    throw;
  }
  resources.owned_gradients->hold_accumulators();
  return chain;
}

}  // namespace sidestream
