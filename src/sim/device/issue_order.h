#pragma once
#include <cstddef>
#include <random>
#include <unordered_map>

#include <sidestream/testing/schedule.h>

#include "sim/device/device.h"

namespace sidestream::sim {

/// Which of a schedule's weights a piece of work has: 0 compute and all that is no copy, 1 device to host, 2 host to device.
[[nodiscard]] std::size_t direction_of(Work::Kind kind) noexcept;

/// Numbers streams from 0 in the order in which they are first met.
class QueueNumbers {
 public:
  std::uint64_t number(c10::StreamId queue) { return numbers_.try_emplace(queue, numbers_.size()).first->second; }

 private:
  std::unordered_map<c10::StreamId, std::uint64_t> numbers_;
};

/// While the program issues work: which of the work that is held back runs before anything forces it.
class IssueOrder {
 public:
  explicit IssueOrder(const Schedule& schedule);

  /// Nothing is ever held back.
  [[nodiscard]] bool immediate() const noexcept { return schedule_.kind() == Schedule::Kind::early; }
  /// Work that has just been issued runs now, after all that it is ordered after.
  [[nodiscard]] bool runs_at_issue(Work::Kind kind, c10::StreamId queue);
  /// Work that is held back and could run now does so. Drawn anew at every call, for seeds.
  [[nodiscard]] bool runs_unforced(Work::Kind kind, c10::StreamId queue);
  [[nodiscard]] bool draws() const noexcept { return schedule_.kind() == Schedule::Kind::seed; }
  [[nodiscard]] const Schedule& schedule() const noexcept { return schedule_; }

 private:
  [[nodiscard]] double eagerness(Work::Kind kind, c10::StreamId queue);

  Schedule schedule_;
  std::mt19937_64 random_;
  bool by_stream_ = false;
  double by_kind_[3] = {};
  std::unordered_map<c10::StreamId, double> of_queue_;
  QueueNumbers queues_;
  std::uint64_t issued_ = 0;
};

}  // namespace sidestream::sim
