#include "graphs/capture/sequence_capture.h"

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string>
#include <typeinfo>
#include <utility>

#include <c10/util/irange.h>

#include "graphs/capture/warmup.h"
#include "graphs/guards/call_generators.h"
#include "graphs/sandbox/sandbox.h"
#include "graphs/sequence/graph_event_state.h"
#include "observe/held_draws.h"
#include "runtime/capture_turn.h"
#include "runtime/draw_order.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// Runs `part`. Adds `where` to errors of the device and of the rules of capture. Errors of the user's code are not changed.
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

/// Before the first capture: other sequences release what they have in shared memory. Throws: UsageError if one awaits a backward.
void take_memory(CapturedSequence& sequence, Runtime& runtime) {
  GraphMemory& memory = *sequence.memory;
  const std::lock_guard lock(memory.mutex());
  memory.check_capture(nullptr);
  memory.give_turn_to(nullptr, runtime, runtime.create_event(), sequence.overwritten);
}

}  // namespace

std::shared_ptr<GraphSequence> SequenceCapture::make_sequence(const GraphResources& resources,
                                                              std::vector<CallSpec> specs,
                                                              const GraphOptions& options) {
  const c10::Device device = resources.runtime->device();
  resources.runtime->check_settings(/*graphs=*/true);
  name_generators(specs, options, device);
  const CaptureTurn turn(device);
  const HeldDraws held(device);
  CapturedSequence sequence(resources, options, nested_order(specs.size()));
  take_memory(sequence, *resources.runtime);
  GraphResources used = resources;
  if (const OwnedStream* const stream = sequence.memory->capture_stream(); stream != nullptr) {
    used.capture_stream = stream;
  }
  const DrawOrder::Capturing in_order(DrawOrder::of(device), *used.runtime, *used.capture_stream);
  SequenceCapture capture(sequence, used, std::move(specs));
  resources.owned_gradients->release_accumulators();
  try {
    capture.run();
  } catch (...) {
    resources.owned_gradients->hold_accumulators();
    resources.exclusions->remove_static_inputs();
    resources.offload->end_forward();
    used.runtime->forget_workspaces(used.capture_stream->get());
    throw;
  }
  resources.owned_gradients->hold_accumulators();
  return std::make_shared<GraphSequence>(resources, std::move(sequence));
}

void SequenceCapture::run() {
  runtime_.synchronize_device();
  runtime_.release_cached_memory();  // of streams that the warm-up does not use
  std::int64_t outside = runtime_.room().outside;
  const auto grown = [&] {
    const std::int64_t before = std::exchange(outside, runtime_.room().outside);
    return std::max<std::int64_t>(0, outside - before);
  };
  {
    const StreamGuard on_capture(runtime_, capture_);
    sizings_ = warm_up(specs_, sequence_.options, runtime_, *resources_.tree, *resources_.exclusions, reads_.met(),
                       resources_.progress);
  }
  runtime_.synchronize_device();
  sequence_.outside.warm_up = grown();
  make_plan_and_pin();
  prepare_calls();
  runtime_.release_cached_memory();
  (void)grown();  // pinned memory has tables on the device too
  {
    // Until the last backward is captured: a backward finds its parameters by the accumulators that the forwards made.
    Sandbox sandbox;
    sandbox.hide_hooks_and_accumulators(all_parameters());
    const StreamGuard on_capture(runtime_, capture_);
    for (const auto graph_index : c10::irange(order_.size())) {
      const std::size_t call = order_.run_at(graph_index);
      if (order_.is_backward(graph_index)) {
        say(ProgressPhase::capture_backward, order_.backward_rank(call), call);
        naming(sequence_.describe(call) + ", backward", [&] { capture_backward(call); });
      } else {
        say(ProgressPhase::capture_forward, call, call);
        naming(sequence_.describe(call) + ", forward", [&] { capture_forward(call); });
      }
    }
    history_.refuse_to_run();
  }
  settle_hooked_weights();
  sequence_.outside.graphs = grown();
  for (Live& live : live_) {
    live = {};
  }
  resources_.exclusions->remove_static_inputs();
  if (sequence_.memory->shared()) {
    share_outputs();
  }
  for (CapturedCall& call : sequence_.calls) {
    call.make_lists();
    if (call.spec.module == nullptr) {
      call.reads.modules.attend_to(call.reads.watched);
    }
  }
  sequence_.pool_use = use_.finish(sequence_.calls, order_);
  runtime_.synchronize_device();
  fill_kept_tensors();
  runtime_.release_cached_memory();
}

void SequenceCapture::say(ProgressPhase phase, std::size_t index, std::size_t call) const {
  if (resources_.progress) {
    resources_.progress({phase, index, specs_.size(), specs_[call].name});
  }
}

void SequenceCapture::record_caller_event() {
  if (const auto& event = sequence_.options.cuda_graph_event(); event != nullptr) {
    runtime_.record(GraphEventState::event_of(*event), capture_);
  }
}

void SequenceCapture::hold_reads(CapturedCall& call) {
  for (const at::Tensor& tensor : reads_.give_to(call)) {
    watch(call, tensor);
  }
}

void SequenceCapture::check_hooked_weights(std::size_t index) const {
  if (sequence_.calls[index].spec.hooks != nullptr && sequence_.change(index).stale()) {
    throw CaptureError("its capture-time hooks placed weights at other addresses for backward than for forward (" +
                       sequence_.difference(index) +
                       "). A replay reads the same addresses in forward and backward; let before_forward and "
                       "before_backward place the weights in the same memory");
  }
}

void SequenceCapture::settle_hooked_weights() {
  for (const auto i : c10::irange(specs_.size())) {
    CapturedCall& call = sequence_.calls[i];
    if (call.spec.hooks != nullptr) {
      CaptureReads::release_registered(call);
      call.placed_by_hooks = sequence_.change(i).stale();
    }
  }
}

}  // namespace sidestream
