#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "runtime/live_memory.h"
#include "runtime/runtime.h"

namespace sidestream {

/// The peak of live memory of an engine's steps. Steps repeat: one is measured after each capture. If the allocator sees a peak that it saw
/// in no measured step, further steps are measured, at growing intervals, until one has a new peak: steps of several shapes take turns.
/// Measuring asks the allocator at each replay, and whenever an eager group is offloaded, reloaded or used.
/// Threads: the step's.
class StepMemory {
 public:
  explicit StepMemory(std::shared_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {}

  /// A planned step begins; `captures`: how many graphs have been captured so far.
  void begin(std::int64_t captures);
  /// It has ended, and went well. Of the measured step that was like it, else of the latest one.
  [[nodiscard]] LiveMemory::Peak end();
  /// It failed.
  void abandon() noexcept { measurement_.reset(); }

 private:
  struct Measured {
    std::int64_t allocated_at_begin = 0;
    LiveMemory::Peak peak;
  };
  /// The measured step with this peak that began as this one; or null.
  [[nodiscard]] Measured* find_measured_with_peak(std::int64_t allocated_peak);

  std::shared_ptr<Runtime> runtime_;
  std::int64_t captures_ = 0;
  std::vector<Measured> measured_;  ///< the latest last
  LiveMemory::Peak latest_;
  bool unknown_ = true;  ///< a step since was like none of them
  std::int64_t allocated_at_begin_ = 0;
  std::int64_t distance_ = 0;  ///< steps that are not measured before the next one is
  std::int64_t since_ = 0;     ///< of them so far
  std::optional<LiveMemory::Measurement> measurement_;
};

/// How much device memory a step takes besides the calls that will be graphs. It is learned in the sizing step, so that captures do not
/// use that memory. It measures how much live memory grew outside of those calls: before each call, and from the last call until backward
/// reaches one. Memory that is offloaded or freed in that time lowers the number, so it is no bound. Threads: any.
class EagerMemoryEstimate {
 public:
  explicit EagerMemoryEstimate(std::shared_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {}

  /// A sizing step begins, or one without calls to come.
  void step_begins();
  /// Around the eager run of a call that will be captured. In other steps they do nothing.
  void call_begins();
  void call_ends();
  /// Ends the measurement of the call. Later changes are not counted. Call it when a backward begins, and when the step ends.
  void close() noexcept;

  /// Bytes, at most at one moment; 0 if no sizing step has ended.
  [[nodiscard]] std::int64_t bytes() const;

 private:
  void look();

  std::shared_ptr<Runtime> runtime_;
  mutable std::mutex mutex_;
  bool counting_ = false;
  std::int64_t live_at_begin_ = 0;
  std::int64_t bytes_ = 0;
  std::optional<LiveMemory::Measurement> measurement_;
};

}  // namespace sidestream
