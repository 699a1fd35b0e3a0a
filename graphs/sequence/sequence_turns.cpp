// Turns of sequences in memory that they share; see Note [Turns in shared memory] in graph_memory.h.
#include <exception>

#include "graphs/sequence/graph_sequence.h"
#include "sidestream/error.h"

namespace sidestream {

bool GraphMemory::pending_beside(const GraphSequence* sequence) {
  const std::lock_guard lock(mutex_);
  return turn_ != nullptr && turn_ != sequence && turn_->pending().any_run();
}

void GraphMemory::check_capture(const GraphSequence* replaced) {
  const std::lock_guard lock(mutex_);
  if (pending_beside(replaced)) {
    refuse("a capture in a pool that others use");
  }
}

void GraphMemory::refuse(const std::string& what) const {
  if (turn_->pending().runs().empty()) {
    throw UsageError(what +
                     ": weight gradients of calls that share its memory are delayed, and this call would overwrite "
                     "what they are computed from. Call backward_dw first, or capture in a pool of its own");
  }
  throw UsageError(what + ": the backward of " + turn_->captured().describe(turn_->pending().runs().latest()) +
                   ", which shares its memory, is still pending, and this call would overwrite tensors that it needs. "
                   "Run that backward first, or capture in a pool of its own");
}

void GraphMemory::give_turn_to(GraphSequence* sequence, Runtime& runtime, const Event& mark,
                               OutputStorage::Counts& counts) {
  while (!still_held_.empty()) {  // before the former's saved tensors are freed
    still_held_.back().before_overwrite(runtime, mark, counts);
    still_held_.pop_back();
  }
  if (turn_ != nullptr) {
    turn_->release_turn();
  }
  turn_ = sequence;
}

void GraphSequence::take_turn(std::size_t index) {
  GraphMemory& memory = *captured_.memory;
  if (memory.turn() == this) {
    return;
  }
  if (memory.pending_beside(this)) {
    memory.refuse(captured_.describe(index));
  }
  memory.give_turn_to(this, *runtime_, streams_.mark(), outputs_.counts().outputs);
}

void GraphSequence::release_turn() {
  streams_.follow_latest_call();
  copies_.join(runtime_->current_stream());
  outputs_.copy_out_all();
  for (CapturedCall& call : captured_.calls) {
    ++call.replay.generation;  // what a retained graph saved is overwritten from here on
  }
  use_.idle();
}

void GraphSequence::release_memory() noexcept {
  if (streams_.launched_any()) {
    outputs_.copy_out_at_end(*captured_.memory);
    try {  // the memory may go now
      const c10::Stream now = runtime_->current_stream();
      if (runtime_->capture_status(now) == CaptureStatus::none) {
        streams_.follow_latest_call();
        copies_.join(now);  // another sequence may write the memory, and the pinned slots, next
        runtime_->synchronize(now);
      }
    } catch (const std::exception&) {  // the device has failed: nothing runs any more
    }
  }
  captured_.memory->ended(this);
}

}  // namespace sidestream
