#include "graphs/capture/sequence_capture.h"

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string>
#include <typeinfo>
#include <utility>

#include <c10/util/irange.h>

#include "graphs/capture/graph_check.h"
#include "graphs/capture/warmup.h"
#include "graphs/guards/call_spec.h"
#include "graphs/sandbox/sandbox.h"
#include "graphs/sequence/sequence_streams.h"
#include "observe/held_draws.h"
#include "runtime/capture_turn.h"
#include "runtime/draw_order.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// Runs `part`. Adds `where` to errors of the device and of the rules of capture. Errors of the user's code are not changed.
template <class Part>
void naming(const CapturedSequence& sequence, std::size_t call, const char* what, const Part& part) {
  const std::string name = '"' + sequence.calls[call].spec.name + '"';
  const std::string where = sequence.describe(call) + ", " + what;
  const auto named = [&](const Error& error) {
    const std::string text = error.what();
    return text.substr(0, text.find(": ")).find(name) == std::string::npos ? where + ": " + text : text;
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

/// Tells Options::progress.
void say(const SequenceCapture& capture, ProgressPhase phase, std::size_t index, std::size_t call) {
  if (capture.resources.progress) {
    capture.resources.progress({phase, index, capture.specs.size(), capture.specs[call].name});
  }
}

/// After all captures and hooks: notes which weights the hooks have put elsewhere.
void settle_hooked_weights(CapturedSequence& sequence) {
  for (const auto i : c10::irange(sequence.calls.size())) {
    CapturedCall& call = sequence.calls[i];
    if (call.spec.hooks != nullptr) {
      CaptureReads::release_registered(call);
      call.placed_by_hooks = sequence.change(i).stale();
    }
  }
}

/// After the last capture: in shared memory later sequences compute where the outputs are.
void share_outputs(CapturedSequence& sequence) {
  for (const auto call : c10::irange(sequence.calls.size())) {
    std::vector<OutputStorage>& storages = sequence.calls[call].output_storages;
    for (const auto index : c10::irange(storages.size())) {
      if (!storages[index].given_back()) {
        storages[index].give_back_to(sequence.pool);
        sequence.released_outputs.push_back({sequence.order.size(), {call, index}});  // after the last graph
      }
    }
  }
}

/// Offloaded bytes of each call are on the device until its sources are released, and again from its reload until its backward has run.
void count_in_flight(const CapturedSequence& sequence, std::vector<PoolUse::GraphUse>& graphs) {
  for (std::size_t i = 0; i < sequence.calls.size(); ++i) {
    const CapturedCall::Copies& copies = sequence.calls[i].copies;
    const auto offloaded = static_cast<std::int64_t>(copies.captured.bytes);
    const auto reloaded = static_cast<std::int64_t>(copies.captured.bytes - copies.captured.for_weights);
    if (offloaded == 0) {
      continue;
    }
    const std::size_t forward = sequence.order.forward_index(i);
    const std::size_t backward = sequence.order.backward_index(i);
    for (std::size_t graph_index = forward; graph_index <= backward; ++graph_index) {
      const std::int64_t here = graph_index < copies.released_at  ? offloaded
                                : graph_index >= copies.reload_at ? reloaded
                                                                  : 0;
      graphs[graph_index].in_flight += graph_index > forward ? here : 0;
      graphs[graph_index].in_flight_after += graph_index < backward ? here : 0;
    }
  }
}

void warm_up_and_capture(SequenceCapture& capture) {
  capture.runtime.synchronize_device();
  capture.runtime.release_cached_memory();  // of streams that the warm-up does not use
  std::int64_t outside = capture.runtime.room().outside;
  const auto grown = [&] {
    const std::int64_t before = std::exchange(outside, capture.runtime.room().outside);
    return std::max<std::int64_t>(0, outside - before);
  };
  {
    const StreamGuard on_capture(capture.runtime, capture.stream);
    capture.sizings =
        warm_up(capture.specs, capture.sequence.options, capture.policy_of, capture.runtime, *capture.resources.tree,
                *capture.resources.exclusions, capture.reads.met(), capture.resources.progress);
  }
  capture.runtime.synchronize_device();
  capture.sequence.outside.warm_up = grown();
  prepare_calls(capture, make_plan_and_pin(capture));
  // The capture stream may read samples that were copied on the current stream.
  capture.runtime.synchronize_device();
  capture.runtime.release_cached_memory();
  (void)grown();  // pinned memory has tables on the device too
  {
    // Until the last backward is captured: a backward finds its parameters by the accumulators that the forwards made.
    Sandbox sandbox;
    sandbox.hide_hooks_and_accumulators(all_parameters(capture.sequence));
    const StreamGuard on_capture(capture.runtime, capture.stream);
    auto weights = capture.order.by_weights().begin();
    const auto capture_weights_before = [&](std::size_t graph_index) {
      for (; weights != capture.order.by_weights().end() && capture.order.weights_index(*weights) <= graph_index;
           ++weights) {
        naming(capture.sequence, *weights, "weight gradients", [&] { capture_weights(capture, *weights); });
      }
    };
    for (const auto graph_index : c10::irange(capture.order.size())) {
      capture_weights_before(graph_index);
      const std::size_t call = capture.order.run_at(graph_index);
      if (capture.order.is_backward(graph_index)) {
        say(capture, ProgressPhase::capture_backward, capture.order.backward_rank(call), call);
        naming(capture.sequence, call, "backward", [&] { capture_backward(capture, call); });
      } else {
        say(capture, ProgressPhase::capture_forward, call, call);
        naming(capture.sequence, call, "forward", [&] { capture_forward(capture, call); });
      }
    }
    capture_weights_before(capture.order.size());
    capture.history.refuse_to_run();
  }
  settle_hooked_weights(capture.sequence);
  capture.sequence.outside.graphs = grown();
  for (SequenceCapture::Live& live : capture.live) {
    live = {};
  }
  capture.resources.exclusions->remove_static_inputs();
  if (capture.sequence.memory->shared()) {
    share_outputs(capture.sequence);
  }
  for (CapturedCall& call : capture.sequence.calls) {
    call.make_lists();
    if (call.spec.module == nullptr) {
      call.reads.modules.attend_to(call.reads.watched);
    }
  }
  capture.sequence.pool_use = capture.use.finish(capture.order.size());
  if (capture.weights_use) {
    capture.sequence.weights_use = capture.weights_use->finish(capture.sequence.calls.size());
  }
  count_in_flight(capture.sequence, capture.sequence.pool_use);
  capture.runtime.synchronize_device();
  fill_kept_tensors(capture);
  capture.runtime.release_cached_memory();
}

}  // namespace

SequenceCapture::SequenceCapture(CapturedSequence& captured, const GraphResources& of_engine,
                                 std::vector<CallSpec> given)
    : sequence(captured),
      resources(of_engine),
      runtime(*resources.runtime),
      order(sequence.order),
      specs(std::move(given)),
      policy_of(gradient_policies(sequence.options, resources.model, specs)),
      reads(*resources.exclusions),
      use(runtime, *sequence.pool),
      lives(specs, order, holders, sequence.options.retain_graph_in_backward()),
      stream(resources.capture_stream->get()),
      live(specs.size()) {
  holders.add([this](KnownReferences& references) {
    for (const CapturedCall& call : sequence.calls) {
      call.tell(references);
    }
  });
  holders.add([this](KnownReferences& references) {
    for (const Live& of_call : live) {
      for (const std::vector<at::Tensor>* const tensors : {&of_call.leaves, &of_call.arguments, &of_call.outputs}) {
        for (const at::Tensor& tensor : *tensors) {
          references.add(tensor);
        }
      }
      if (of_call.recorder != nullptr) {
        for (const SavedIdentity& identity : of_call.recorder->identities()) {
          if (const auto saved = identity.saved.lock(); saved != nullptr) {
            references.add(*saved);
          }
        }
      }
    }
  });
}

void SequenceCapture::release_before(std::size_t graph_index) {
  for (const CapturedCall& call : sequence.calls) {
    if (call.copies.released_at == graph_index) {
      CaptureOffload::release(call.copies.captured);
    }
  }
  for (const Link& output : lives.ended_before(graph_index)) {
    sequence.calls[output.call].output_storages[output.index].give_back_to(sequence.pool);
    sequence.released_outputs.push_back({graph_index, output});
  }
}

void SequenceCapture::record_caller_event() const {
  if (const auto& event = sequence.options.cuda_graph_event(); event != nullptr) {
    runtime.record(GraphEventState::event_of(*event), stream);
  }
}

void check_captured(const SequenceCapture& capture, std::size_t index, Direction direction) {
  const CapturedCall& call = capture.sequence.calls[index];
  const bool forward = direction == Direction::forward;
  const bool weights = direction == Direction::weights;
  const CapturedCall::OneGraph& captured = forward ? call.forward : weights ? call.weights : call.backward;
  std::vector<const ExternalEvent*> ready;
  for (const CapturedCopies::Group& group : call.copies.captured.groups) {
    for (const ExternalEvent& event : group.ready) {
      ready.push_back(&event);
    }
  }
  const std::string what = capture.sequence.describe(index) + (forward   ? ", forward"
                                                               : weights ? ", weight gradients"
                                                                         : ", backward");
  const std::vector<GraphNode> nodes = capture.runtime.nodes(captured.graph);
  check_graph_events(nodes, captured.names, captured.done, forward ? ready : std::vector<const ExternalEvent*>(), what);
  check_nodes(nodes, captured.names, call.copies.captured, what);
  check_copy_ends(call.copies.captured, direction, what);
}

std::shared_ptr<GraphSequence> capture_sequence(const GraphResources& resources, std::vector<CallSpec> specs,
                                                SequenceOrder order, const GraphOptions& options) {
  const c10::Device device = resources.runtime->device();
  resources.runtime->check_settings(/*graphs=*/true);
  name_generators(specs, options, device);
  const CaptureTurn turn(device);
  const HeldDraws held(device);
  CapturedSequence sequence(resources, options, std::move(order));
  take_memory(sequence, *resources.runtime);
  GraphResources used = resources;
  if (const OwnedStream* const stream = sequence.memory->capture_stream(); stream != nullptr) {
    used.capture_stream = stream;
  }
  const DrawOrder::Capturing in_order(DrawOrder::of(device), *used.runtime, *used.capture_stream);
  SequenceCapture capture(sequence, used, std::move(specs));
  resources.owned_gradients->release_accumulators();
  try {
    warm_up_and_capture(capture);
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

}  // namespace sidestream
