#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "analysis/copy_places.h"

namespace sidestream {

/// Bytes a second.
struct LinkPace {
  double to_host = 0;
  double to_device = 0;
};

/// Seconds.
struct TimeSpan {
  double begin = 0;
  double end = 0;
};

/// The times of an order's graphs, which run one after the other, and of the copies beside them.
///
/// Copies of one direction run one after the other. A run is offloaded bit by bit as its forward runs. Each graph waits for copies as
/// SequenceCopies says: for the copies whose sources are released before it, and a backward for its reload. A reload is queued
/// after the first of these waits.
class CopyClock {
 public:
  /// `offloaded` and `places` by run. All but `link` must outlive this object.
  CopyClock(const SequenceOrder& order, const std::vector<std::uint64_t>& offloaded,
            const std::vector<CopyPlaces>& places, const LinkPace& link);

  [[nodiscard]] double now() const noexcept { return now_; }
  /// Nothing is launched before `time`.
  void wait_until(double time);
  /// Runs other work than the order's graphs.
  void work(double seconds) { now_ += seconds; }
  /// Runs the next graph of the order once its copies are done.
  TimeSpan run_graph(double seconds);
  /// By run; zeros for runs that are not offloaded.
  [[nodiscard]] const std::vector<TimeSpan>& offloads() const noexcept { return offloads_; }
  [[nodiscard]] const std::vector<TimeSpan>& reloads() const noexcept { return reloads_; }

 private:
  void begin_reloads(std::size_t graph_index);

  const SequenceOrder& order_;
  const std::vector<std::uint64_t>& offloaded_;
  const std::vector<CopyPlaces>& places_;
  LinkPace link_;
  std::vector<TimeSpan> offloads_;
  std::vector<TimeSpan> reloads_;
  double now_ = 0;
  double to_host_free_ = 0;
  double to_device_free_ = 0;
  std::size_t next_ = 0;      // graph index
  std::size_t released_ = 0;  // runs
  std::size_t reloaded_ = 0;  // in the order of backwards
};

}  // namespace sidestream
