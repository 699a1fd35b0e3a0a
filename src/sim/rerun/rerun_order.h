#pragma once
#include <cstddef>
#include <cstdint>
#include <random>
#include <unordered_map>
#include <vector>

#include <sidestream/testing/schedule.h>

#include "sim/rerun/recording.h"

namespace sidestream::sim {

/// When a recording runs again: which of the pieces of work that may run is next.
class RerunOrder {
 public:
  /// `works` must outlive it.
  RerunOrder(const Schedule& schedule, const std::vector<RecordedWork>& works);

  /// Index into `ready` (not empty), whose entries are positions in issue order.
  [[nodiscard]] std::size_t choose(const std::vector<std::uint32_t>& ready);

 private:
  [[nodiscard]] int rank(std::uint32_t candidate) const noexcept;
  [[nodiscard]] std::uint64_t priority(c10::StreamId queue);

  Schedule schedule_;
  const std::vector<RecordedWork>& works_;
  std::mt19937_64 random_;
  bool by_stream_ = false;
  c10::StreamId starved_ = 0;
  double weights_[3] = {1, 1, 1};
  std::unordered_map<c10::StreamId, std::uint64_t> priorities_;
  std::vector<std::size_t> redraws_;  ///< counts of finished work at which the priorities are drawn anew
  std::size_t finished_ = 0;
};

}  // namespace sidestream::sim
