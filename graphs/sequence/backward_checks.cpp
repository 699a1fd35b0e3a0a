// What is checked before a backward graph, and before the graph of delayed weight gradients.
#include <string>

#include <c10/util/irange.h>

#include "graphs/sequence/captured_sequence.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// A graph that reads what the forward left.
struct Reader {
  const char* name;
  const char* after;
  const char* call;
  const char* since;  ///< then it was possible to change what it reads
  const char* remedy;
};
constexpr Reader kBackward{"its backward", "the backward", "backward()", "since its forward",
                           "Change weights between steps, not between forward and backward"};
constexpr Reader kWeights{"backward_dw", "backward_dw", "backward_dw()", "since its backward",
                          "Call backward_dw before you change weights"};

/// In plain training autograd compares the versions of saved tensors; a graph reads the same bytes.
/// Throws: UsageError that names a tensor that was changed in place and that `reader` needs.
void check_versions(const CapturedCall& call, const Reader& reader) {
  const auto changed = [&](const char* what, std::size_t index, const char* why) {
    throw UsageError("graphed call \"" + call.spec.name + "\": " + what + std::to_string(index) +
                     " was changed in place before " + reader.name + ", " + why +
                     ": clone it before the in-place operation");
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
void check_state(const CapturedSequence& sequence, std::size_t index, const Reader& reader) {
  const CapturedCall& call = sequence.calls[index];
  const CallModes& captured = call.spec.state.backward_modes;
  const CallModes now = CallModes::current(captured.autocast.type);
  if (!(now == captured)) {
    const bool autocast = !(now.autocast == captured.autocast);
    throw UsageError(sequence.describe(index) + ": " + reader.name + " runs in another state of " +
                     (autocast ? "autocast" : "the global switches (deterministic algorithms, precision, back ends)") +
                     " than it was captured in" +
                     (autocast && now.autocast.enabled
                          ? std::string("; call ") + reader.call + " outside of the autocast region"
                          : "; set it as in the step that was captured") +
                     ", or call OffloadEngine::reset");
  }
  for (const BackwardRead& read : call.reads.in_backward) {
    if (read.counter.current_version() != read.at_forward) {
      throw UsageError(sequence.describe(index) + ": " + read.name + ", which " + reader.name +
                       " needs, has been modified by an inplace operation since its forward (version " +
                       std::to_string(read.counter.current_version()) + ", expected " +
                       std::to_string(read.at_forward) + "); change it after " + reader.after);
    }
  }
  FactsChange weights = call.reads.modules.tensors_change();
  TensorFacts::add_changes(call.reads.watched, weights);
  if (weights.stale()) {
    throw UsageError(sequence.describe(index) + ": " + reader.since + ", " + sequence.difference(index) + "; " +
                     reader.name + " would read weights that the model no longer has. " + reader.remedy);
  }
}

/// Plain training decides in the backward who gets a gradient.
void refuse_frozen(const CapturedCall& call, OutputSet used, const char* between, const char* remedy) {
  for (const std::size_t i : call.lists.delayed_parameters) {
    if ((call.parameters[i].outputs & used) != 0 && !call.parameters[i].tensor.requires_grad()) {
      throw UsageError("graphed call \"" + call.spec.name +
                       "\": a parameter whose gradient is delayed was frozen between " + between + ". " + remedy +
                       " after backward_dw");
    }
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

void CapturedSequence::check_backward(std::size_t index, std::uint64_t generation, bool has_turn) const {
  const CapturedCall& call = calls[index];
  if (!call.backward.graph) {
    throw UsageError(describe(index) + ": it was reset before this backward; run the backward first");
  }
  if (!has_turn) {
    throw UsageError(describe(index) +
                     ": another capture in the same memory was replayed since its forward, and has overwritten its " +
                     "saved tensors; run its backward before that replay, or capture it in a pool of its own");
  }
  if (call.replay.given_up) {
    throw UsageError(describe(index) +
                     ": its backward runs after that of a call before it, which has overwritten its saved tensors; the "
                     "step that was recorded had no backward of it. Run it first, or call OffloadEngine::reset: the "
                     "next step is recorded again");
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
                     ", but its saved tensors were not kept; capture with GraphOptions::retain_graph_in_backward" +
                     (call.delays ? ", and with another GradientPolicy than delayed" : ""));
  }
  check_state(*this, index, kBackward);
  check_versions(call, kBackward);
  refuse_frozen(call, all_outputs, "the call's forward and its backward", "Freeze it before the forward or");
}

void CapturedSequence::check_order_of_backward(std::size_t index, const PendingRuns& pending,
                                               const PendingRuns& weights) const {
  const std::size_t graph_index = order.backward_index(index);
  auto obstacle = pending.obstacle(graph_index);
  for (std::size_t call = 0; obstacle && calls[*obstacle].spec.may_lack_backward; ++call) {  // another one may not
    if (call == calls.size()) {
      obstacle.reset();
    } else if (pending.contains(call) && order.backward_index(call) < graph_index) {
      obstacle = call;
    }
  }
  if (obstacle) {
    check_turn(index, *obstacle, "backward");
    throw UsageError(
        describe(index) + ": its backward runs before that of \"" + calls[*obstacle].spec.name + "\", which was " +
        "called after it; run the backwards of calls that were captured together in reverse order, or capture the "
        "calls separately. If that call is to have no backward, drop or detach its outputs first");
  }
  if (const auto delayed = weights.obstacle(graph_index)) {
    check_turn_of_weights(index, *delayed, "backward");
    throw UsageError(
        describe(index) + ": its backward would overwrite what the delayed weight gradients of " + describe(*delayed) +
        " are computed from, because the recorded step had these before this backward; call backward_dw in "
        "that order, give step() the order that runs, or call OffloadEngine::reset to record it again");
  }
}

void CapturedSequence::check_weights(std::size_t index) const {
  if (!calls[index].replay.weights_delayed) {
    throw UsageError(
        describe(index) +
        ": its weight gradients cannot be computed: it was reset since its backward. Call backward_dw before "
        "a reset, a switch of offload or a change of weights");
  }
  check_state(*this, index, kWeights);
  check_versions(calls[index], kWeights);
  refuse_frozen(calls[index], calls[index].replay.used, "the call's backward and backward_dw", "Freeze it");
}

}  // namespace sidestream
