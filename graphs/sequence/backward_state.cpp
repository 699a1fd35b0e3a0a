#include "graphs/sequence/graph_sequence.h"
#include "sidestream/error.h"

namespace sidestream {

void GraphSequence::check_backward_state(std::size_t index) const {
  const CapturedCall& call = calls_[index];
  const CallModes& captured = call.spec.state.backward_modes;
  const CallModes now = CallModes::current(captured.autocast.type);
  if (!(now == captured)) {
    const bool autocast = !(now.autocast == captured.autocast);
    throw UsageError(describe(index) + ": its backward runs in another state of " +
                     (autocast ? "autocast" : "the global switches (deterministic algorithms, precision, back ends)") +
                     " than it was captured in" +
                     (autocast && now.autocast.enabled ? "; call backward() outside of the autocast region"
                                                       : "; set it as in the step that was captured") +
                     ", or call OffloadEngine::reset");
  }
  for (const BackwardRead& read : call.backward_reads) {
    if (read.counter.current_version() != read.at_forward) {
      throw UsageError(describe(index) + ": " + read.name +
                       ", which its backward needs, has been modified by an inplace operation since its forward "
                       "(version " +
                       std::to_string(read.counter.current_version()) + ", expected " +
                       std::to_string(read.at_forward) + "); change it after the backward");
    }
  }
  FactsChange weights = call.modules.tensors_change();
  TensorFacts::add_changes(call.watched, weights);
  if (weights.stale()) {
    throw UsageError(
        describe(index) + ": " + difference(index) +
        " when its forward ran; its backward would read weights that the model no longer has. Change weights " +
        "between steps, not between forward and backward");
  }
}

}  // namespace sidestream
