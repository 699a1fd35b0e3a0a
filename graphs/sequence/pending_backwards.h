#pragma once
#include <chrono>
#include <cstddef>
#include <mutex>

#include "analysis/sequence_order.h"
#include "graphs/sequence/graph_memory.h"

namespace sidestream {

/// The calls of a sequence that await their backward: what they saved lies in the sequence's memory.
/// Threads: `ready`, `any` and `await_none` lock the memory's mutex. The caller of the other functions holds it.
class PendingBackwards {
 public:
  /// Both must outlive this object.
  PendingBackwards(const SequenceOrder& order, GraphMemory& memory) : order_(order), memory_(memory), runs_(order) {}

  /// True if `call` may replay its forward now: neither it nor a later call awaits its backward.
  [[nodiscard]] bool ready(std::size_t call) const {
    const std::lock_guard lock(memory_.mutex());
    return !runs_.obstacle(order_.forward_index(call));
  }
  [[nodiscard]] bool any() const {
    const std::lock_guard lock(memory_.mutex());
    return !runs_.empty();
  }
  /// Blocks the host until no call awaits its backward, or until `bound`. The caller does not hold the mutex.
  void await_none(std::chrono::steady_clock::time_point bound) const {
    std::unique_lock lock(memory_.mutex());
    (void)memory_.settled().wait_until(lock, bound, [this] { return runs_.empty(); });
  }

  [[nodiscard]] const PendingRuns& runs() const noexcept { return runs_; }
  /// The forward of `call` was launched.
  void begin(std::size_t call) { runs_.begin(call); }
  /// The backward of `call` was launched, or will not come.
  void end(std::size_t call) noexcept {
    runs_.end(call);
    if (runs_.empty()) {
      memory_.settled().notify_all();
    }
  }

 private:
  const SequenceOrder& order_;
  GraphMemory& memory_;
  PendingRuns runs_;
};

}  // namespace sidestream
