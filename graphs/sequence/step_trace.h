#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <c10/core/Stream.h>

#include "runtime/live_memory.h"
#include "runtime/runtime.h"

namespace sidestream {

class GraphSequence;

/// What the launches of one step meant for the device: the peak of live memory from each launch to the next, and, if the device keeps
/// time, how long each graph waited for copies and ran. Steps that are not traced pay one load for each launch.
///
/// Ordering: adds timing events on the streams of the graphs.  Capture: illegal.
/// Threads: `begin`, `end` and `launches` on the step's; launches on any, one at a time.
class StepTrace {
 public:
  struct Launch {
    const GraphSequence* sequence = nullptr;
    std::size_t graph_index = 0;
    std::int64_t during = 0;  ///< peak of live bytes while the graph runs
    std::int64_t after = 0;   ///< and from then until the next launch or the end
    double waited = 0;        ///< seconds; 0 without a clock
    double ran = 0;           ///< seconds; 0 without a clock
  };
  /// Around the launch of one graph. Does nothing in steps that are not traced.
  class Graph {
   public:
    /// `side` waits for no copy yet. `trace` may be null.
    Graph(StepTrace* trace, c10::Stream side);
    /// `side` waits for all copies.
    void waits_queued();
    /// The graph was launched. LiveMemory has not been told.
    void launched(const GraphSequence& sequence, std::size_t graph_index);
    /// LiveMemory was told.
    void counted();

   private:
    StepTrace* trace_;
    c10::Stream side_;
    Event begin_;
    Event ready_;
  };

  explicit StepTrace(std::shared_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {}

  void begin();
  /// The step's work is queued.
  void end();
  void abandon() noexcept;
  /// Since the latest `begin`.
  [[nodiscard]] std::int64_t peak_before() const noexcept { return peak_before_; }
  /// Since the latest `begin`, once. Blocks the host until the step's work is done.
  [[nodiscard]] std::vector<Launch> launches();
  /// Of that step; 0 without a clock. Only after `launches`.
  [[nodiscard]] double seconds() const noexcept { return seconds_; }

 private:
  struct Timed {
    Launch launch;
    Event begin;
    Event ready;
    Event done;
  };
  [[nodiscard]] std::int64_t close_segment();

  std::shared_ptr<Runtime> runtime_;
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  std::optional<LiveMemory::Measurement> segment_;
  std::vector<Timed> timed_;
  std::int64_t peak_before_ = 0;
  Event begin_;
  Event end_;
  double seconds_ = 0;
};

}  // namespace sidestream
