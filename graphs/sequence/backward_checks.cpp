// The checks before a backward replays: its order, its state, and the versions of the tensors that it reads.
#include "graphs/sequence/backward_checks.h"

#include <string>

#include <c10/util/irange.h>

#include "graphs/gradients/owned_gradients.h"
#include "graphs/sequence/graph_sequence.h"
#include "sidestream/error.h"

namespace sidestream {

void stamp_versions(CapturedCall& call, c10::ArrayRef<at::Tensor> inputs, const detail::TensorBuffer& outputs) {
  for (const std::size_t i : call.lists.stamped_inputs) {  // what else is saved was copied: the caller's own may change
    call.inputs[i].version = VersionStamp(inputs[i]);
  }
  for (const auto i : c10::irange(call.outputs.size())) {
    StaticOutput& output = call.outputs[i];
    if (output.saved || output.overlaps) {
      output.version = VersionStamp(outputs[i]);
    }
  }
}

void check_versions(const CapturedCall& call) {
  const auto changed = [&](const char* what, std::size_t index, const char* why) {
    throw UsageError("graphed call \"" + call.spec.name + "\": " + what + std::to_string(index) +
                     " was changed in place before its backward, " + why + ": clone it before the in-place operation");
  };
  for (const std::size_t i : call.lists.stamped_inputs) {
    if (!call.inputs[i].version.unchanged()) {
      changed("input ", i, "which needs it");
    }
  }
  for (const auto i : c10::irange(call.outputs.size())) {
    const StaticOutput& output = call.outputs[i];
    if ((output.saved || output.overlaps) && !output.version.unchanged()) {
      changed(
          "output ", i,
          output.saved ? "which needs it" : "and it shares memory with another output, whose gradient would be wrong");
    }
  }
}

void GraphSequence::check_backward(std::size_t index, std::uint64_t generation) {
  CapturedCall& call = captured_.calls[index];
  if (!call.backward.graph) {
    throw UsageError(captured_.describe(index) + ": it was reset before this backward; run the backward first");
  }
  if (captured_.memory->turn() != this) {
    throw UsageError(captured_.describe(index) +
                     ": another capture in the same memory was replayed since its forward, and has overwritten its " +
                     "saved tensors; run its backward before that replay, or capture it in a pool of its own");
  }
  if (call.replay.generation != generation) {
    throw UsageError(captured_.describe(index) +
                     ": this backward belongs to an earlier forward, whose saved tensors a later one has " +
                     "overwritten; run each backward before the next forward of the same capture");
  }
  if (call.replay.backward_failed && call.accumulates) {
    throw UsageError(captured_.describe(index) + ": its backward failed after its graph had begun to add into .grad; " +
                     "set the gradients to none and run its forward again");
  }
  if (call.replay.backward_launched && !captured_.options.retain_graph_in_backward()) {
    throw UsageError(captured_.describe(index) + ": its backward is run a second time" +
                     (call.replay.backward_failed ? ", after one that failed after the launch of its graph" : "") +
                     ", but its saved tensors were not kept; capture with GraphOptions::retain_graph_in_backward");
  }
  if (const auto obstacle = pending_.runs().obstacle(captured_.order.backward_index(index))) {
    throw UsageError(
        captured_.describe(index) + ": its backward runs before that of \"" + captured_.calls[*obstacle].spec.name +
        "\", which was " +
        "called after it; run the backwards of calls that were captured together in reverse order, or capture the "
        "calls separately");
  }
  check_backward_state(index);
  check_versions(call);
  if (call.accumulates) {
    call.replay.grads_in_place = are_in_place(call.lists.accumulated);
    if (!call.replay.grads_in_place) {
      check_owned_grads(call.spec.name, call.parameters);
    }
  }
}

void GraphSequence::check_backward_state(std::size_t index) const {
  const CapturedCall& call = captured_.calls[index];
  const CallModes& captured = call.spec.state.backward_modes;
  const CallModes now = CallModes::current(captured.autocast.type);
  if (!(now == captured)) {
    const bool autocast = !(now.autocast == captured.autocast);
    throw UsageError(captured_.describe(index) + ": its backward runs in another state of " +
                     (autocast ? "autocast" : "the global switches (deterministic algorithms, precision, back ends)") +
                     " than it was captured in" +
                     (autocast && now.autocast.enabled ? "; call backward() outside of the autocast region"
                                                       : "; set it as in the step that was captured") +
                     ", or call OffloadEngine::reset");
  }
  for (const BackwardRead& read : call.reads.in_backward) {
    if (read.counter.current_version() != read.at_forward) {
      throw UsageError(captured_.describe(index) + ": " + read.name +
                       ", which its backward needs, has been modified by an inplace operation since its forward "
                       "(version " +
                       std::to_string(read.counter.current_version()) + ", expected " +
                       std::to_string(read.at_forward) + "); change it after the backward");
    }
  }
  FactsChange weights = call.reads.modules.tensors_change();
  TensorFacts::add_changes(call.reads.watched, weights);
  if (weights.stale()) {
    throw UsageError(
        captured_.describe(index) + ": " + captured_.difference(index) +
        " when its forward ran; its backward would read weights that the model no longer has. Change weights " +
        "between steps, not between forward and backward");
  }
}

}  // namespace sidestream
