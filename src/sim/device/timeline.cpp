#include "sim/device/timeline.h"

#include <utility>

#include "sim/torch/generator.h"

namespace sidestream::sim {
void run_work(const Work& work, const GeneratorState* random) {
  if (!work.run) {
    return;
  }
  if (random == nullptr) {
    work.run();
    return;
  }
  GeneratorState draws = *random;
  const ReplayState replay(draws);
  work.run();
}

void Timeline::run(Queued& queued) {
  queued.done = true;
  // Only after the work has run: until then, other threads must not go on without the caller's lock (Device::ready).
  struct Lower {
    ~Lower() { pending.fetch_sub(1, std::memory_order_acq_rel); }
    std::atomic<std::size_t>& pending;
  } const lower{pending_};
  if (queued.event) {
    queued.event->done_at = std::chrono::steady_clock::now();
  }
  // The entry may be forgotten while the work runs.
  const std::shared_ptr<const Work> work = queued.work;
  const std::shared_ptr<const GeneratorState> random = queued.random;
  run_work(*work, random.get());
}

WorkId Timeline::append(Queued queued) {
  const WorkId id = first_ + queue_.size();
  const bool run_now = !queued.done && order_.runs_at_issue(queued.work->kind, queued.queue);
  if (!queued.done) {
    pending_.fetch_add(1, std::memory_order_acq_rel);
  }
  queue_.push_back(std::move(queued));
  if (run_now) {
    force(id);
  }
  return id;
}

void Timeline::force(WorkId id) {
  if (done(id)) {
    return;
  }
  // Depth first without recursion: a chain is as long as a step.
  c10::SmallVector<WorkId, 64> stack{id};
  while (!stack.empty()) {
    const WorkId top = stack.back();
    if (done(top)) {
      stack.pop_back();
      continue;
    }
    Queued& queued = queue_[top - first_];
    const std::size_t depth = stack.size();
    for (auto before = queued.after.rbegin(); before != queued.after.rend(); ++before) {
      if (!done(*before)) {
        stack.push_back(*before);
      }
    }
    if (stack.size() == depth) {
      stack.pop_back();
      run(queued);
    }
  }
  forget_finished();
}

void Timeline::drain() {
  for (WorkId id = first_; id < first_ + queue_.size(); ++id) {
    force(id);
  }
}

void Timeline::stir() {
  if (!order_.draws() || !pending()) {
    return;
  }
  for (WorkId id = first_; id < first_ + queue_.size(); ++id) {
    if (done(id)) {
      continue;
    }
    const Queued& queued = queue_[id - first_];
    if (order_.runs_unforced(queued.work->kind, queued.queue)) {
      force(id);
    }
  }
}

void Timeline::forget_finished() {
  if (keeping_) {
    return;
  }
  while (!queue_.empty() && queue_.front().done) {
    queue_.pop_front();
    ++first_;
  }
}

void Timeline::set_order(const Schedule& schedule) {
  drain();
  order_ = IssueOrder(schedule);
}

void Timeline::start_keeping() {
  drain();
  forget_finished();
  keeping_ = true;
}

std::deque<Queued> Timeline::stop_keeping() {
  drain();
  keeping_ = false;
  first_ += queue_.size();
  return std::exchange(queue_, {});
}

}  // namespace sidestream::sim
