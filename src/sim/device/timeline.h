#pragma once
#include <atomic>
#include <deque>
#include <memory>

#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include "sim/device/device.h"
#include "sim/device/issue_order.h"

namespace sidestream::sim {

struct GeneratorState;

/// Work in the queue of its stream, with what it is ordered after.
struct Queued {
  std::shared_ptr<const Work> work;
  c10::StreamId queue = 0;  ///< the stream; within a graph, the launching stream and its forks
  c10::SmallVector<WorkId, 2> after;
  std::shared_ptr<const GeneratorState>
      random;                            ///< what this run draws from; null: nothing, or what the first run drew
  c10::intrusive_ptr<EventState> event;  ///< of an event record, to stamp when it runs
  bool done = false;
};

/// Runs `work`; its draws start at `random`, unless that is null.
void run_work(const Work& work, const GeneratorState* random);

/// All work that is queued, in issue order: the streams' queues with their edges. Work is held until work that is ordered after it is
/// forced, or until the order lets it run. Threads: under the caller's lock, except `pending`.
class Timeline {
 public:
  /// Takes over work that is done or, if not, may be run from now on.
  WorkId append(Queued queued);
  [[nodiscard]] bool done(WorkId id) const noexcept { return id < first_ || queue_[id - first_].done; }
  /// True if order after `id` must be kept: it has not run, or everything is kept for a recording.
  [[nodiscard]] bool matters(WorkId id) const noexcept {
    return id >= first_ && (keeping_ || !queue_[id - first_].done);
  }
  /// Runs `id` and all that it is ordered after, in issue order within a stream.
  void force(WorkId id);
  void drain();
  /// Lets held back work run where the order draws so.
  void stir();
  [[nodiscard]] bool pending() const noexcept { return pending_.load(std::memory_order_acquire) != 0; }

  void set_order(const Schedule& schedule);
  [[nodiscard]] const IssueOrder& order() const noexcept { return order_; }

  /// From now on finished work stays, for a recording. The timeline must be drained.
  void start_keeping();
  /// Drains, and hands out all work since `start_keeping`; its first has the number `first_id()` had then.
  [[nodiscard]] std::deque<Queued> stop_keeping();
  [[nodiscard]] bool keeping() const noexcept { return keeping_; }
  [[nodiscard]] WorkId first_id() const noexcept { return first_; }
  [[nodiscard]] WorkId next_id() const noexcept { return first_ + queue_.size(); }

 private:
  void run(Queued& queued);
  void forget_finished();

  IssueOrder order_{Schedule()};
  std::deque<Queued> queue_;
  WorkId first_ = no_work + 1;
  std::atomic<std::size_t> pending_{0};
  bool keeping_ = false;
};

}  // namespace sidestream::sim
