// The checks before a backward replays: its order, its state, and the versions of the tensors that it reads.
#include <string>

#include <c10/util/irange.h>

#include "graphs/sequence/captured_sequence.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// In plain training autograd compares the versions of saved tensors; a graph reads the same bytes.
/// Throws: UsageError that names a tensor that was changed in place and that the backward needs.
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

/// Throws: UsageError if the backward graph would read or do something else than at its capture.
void check_state(const CapturedSequence& sequence, std::size_t index) {
  const CapturedCall& call = sequence.calls[index];
  const CallModes& captured = call.spec.state.backward_modes;
  const CallModes now = CallModes::current(captured.autocast.type);
  if (!(now == captured)) {
    const bool autocast = !(now.autocast == captured.autocast);
    throw UsageError(sequence.describe(index) + ": its backward runs in another state of " +
                     (autocast ? "autocast" : "the global switches (deterministic algorithms, precision, back ends)") +
                     " than it was captured in" +
                     (autocast && now.autocast.enabled ? "; call backward() outside of the autocast region"
                                                       : "; set it as in the step that was captured") +
                     ", or call OffloadEngine::reset");
  }
  for (const BackwardRead& read : call.reads.in_backward) {
    if (read.counter.current_version() != read.at_forward) {
      throw UsageError(sequence.describe(index) + ": " + read.name +
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
        sequence.describe(index) + ": " + sequence.difference(index) +
        " when its forward ran; its backward would read weights that the model no longer has. Change weights " +
        "between steps, not between forward and backward");
  }
}

}  // namespace

void CapturedCall::stamp_versions(c10::ArrayRef<at::Tensor> given, const detail::TensorBuffer& made) {
  for (const std::size_t i : lists.stamped_inputs) {  // what else is saved was copied: the caller's own may change
    inputs[i].version = VersionStamp(given[i]);
  }
  for (const auto i : c10::irange(outputs.size())) {
    StaticOutput& output = outputs[i];
    if (output.saved || output.overlaps) {
      output.version = VersionStamp(made[i]);
    }
  }
}

void CapturedSequence::check_backward(std::size_t index, std::uint64_t generation, bool has_turn,
                                      const PendingRuns& pending) const {
  const CapturedCall& call = calls[index];
  if (!call.backward.graph) {
    throw UsageError(describe(index) + ": it was reset before this backward; run the backward first");
  }
  if (!has_turn) {
    throw UsageError(describe(index) +
                     ": another capture in the same memory was replayed since its forward, and has overwritten its " +
                     "saved tensors; run its backward before that replay, or capture it in a pool of its own");
  }
  if (call.replay.generation != generation) {
    throw UsageError(describe(index) +
                     ": this backward belongs to an earlier forward, whose saved tensors a later one has " +
                     "overwritten; run each backward before the next forward of the same capture");
  }
  if (call.replay.backward_failed && call.accumulates) {
    throw UsageError(describe(index) + ": its backward failed after its graph had begun to add into .grad; " +
                     "set the gradients to none and run its forward again");
  }
  if (call.replay.backward_launched && !options.retain_graph_in_backward()) {
    throw UsageError(describe(index) + ": its backward is run a second time" +
                     (call.replay.backward_failed ? ", after one that failed after the launch of its graph" : "") +
                     ", but its saved tensors were not kept; capture with GraphOptions::retain_graph_in_backward");
  }
  if (const auto obstacle = pending.obstacle(order.backward_index(index))) {
    throw UsageError(
        describe(index) + ": its backward runs before that of \"" + calls[*obstacle].spec.name + "\", which was " +
        "called after it; run the backwards of calls that were captured together in reverse order, or capture the "
        "calls separately");
  }
  check_state(*this, index);
  check_versions(call);
}

}  // namespace sidestream
