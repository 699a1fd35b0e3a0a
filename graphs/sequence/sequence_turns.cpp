// Turns of sequences in memory that they share; see Note [Turns in shared memory] in graph_memory.h.
#include "graphs/sequence/graph_sequence.h"
#include "sidestream/error.h"

namespace sidestream {

bool GraphMemory::pending() {
  const std::lock_guard lock(mutex_);
  return turn_ != nullptr && turn_->any_pending();
}

bool GraphSequence::has_to_wait() const {
  const std::lock_guard lock(mutex_);
  const GraphSequence* const other = memory_->turn();
  return other != nullptr && other != this && !other->pending_.empty();
}

void GraphSequence::refuse_turn(const std::string& what) const {
  const GraphSequence& other = *memory_->turn();
  throw UsageError(what + ": the backward of " + other.describe(other.pending_.latest()) +
                   ", which shares its memory, is still pending, and this call would overwrite tensors that it needs. "
                   "Run that backward first, or capture in a pool of its own");
}

void GraphSequence::check_turn() const {
  const std::lock_guard lock(mutex_);
  if (has_to_wait()) {
    refuse_turn("a capture in a pool that others use");
  }
}

void GraphSequence::take_turn(std::size_t index) {
  GraphSequence* const former = memory_->turn();
  if (former == this) {
    return;
  }
  if (has_to_wait()) {
    refuse_turn(describe(index));
  }
  memory_->part_with_left_behind(*runtime_, fork_, counts_.outputs);  // before the former's saved tensors are freed
  if (former != nullptr) {
    former->give_up_turn();
  }
  memory_->set_turn(this);
}

void GraphSequence::follow_latest_call() {
  const c10::Stream now = runtime_->current_stream();
  if (called_on_ && *called_on_ != now) {
    runtime_->record(fork_, *called_on_);
    runtime_->wait(now, fork_);
  }
}

void GraphSequence::give_up_turn() {
  follow_latest_call();
  copies_.join(runtime_->current_stream());
  for (CapturedCall& call : calls_) {
    for (OutputStorage& storage : call.output_storages) {
      storage.before_overwrite(*runtime_, fork_, counts_.outputs);
    }
  }
  overwrite_given_gradients(0);
  for (CapturedCall& call : calls_) {
    ++call.replay.generation;  // what a retained graph saved is overwritten from here on
  }
  use_.idle();
}

void GraphSequence::leave_memory() noexcept {
  if (called_on_) {
    part_with_outputs();
  }
  released_.clear();
  gave_gradients_.clear();
  memory_->leave(this);
}

void GraphSequence::begin_capture() {
  const std::lock_guard lock(mutex_);
  GraphSequence* const former = memory_->turn();
  check_turn();
  memory_->part_with_left_behind(*runtime_, fork_, counts_.outputs);
  if (former != nullptr) {
    former->give_up_turn();
    memory_->set_turn(nullptr);
  }
}

void GraphSequence::share_outputs() {
  for (std::size_t call = 0; call < calls_.size(); ++call) {
    std::vector<OutputStorage>& storages = calls_[call].output_storages;
    for (std::size_t index = 0; index < storages.size(); ++index) {
      if (!storages[index].given_back()) {
        storages[index].give_back_to(pool_);
        released_.add(order_.size(), call, index);  // after the last graph of this sequence
      }
    }
  }
}

}  // namespace sidestream
