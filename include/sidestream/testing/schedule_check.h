#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "sidestream/detail/export.h"
#include "sidestream/testing/schedule.h"

namespace sidestream {

/// A schedule under which the recorded work gives other bytes than in the order of issue.
struct Divergence {
  Schedule schedule;       ///< the schedule
  std::int64_t bytes = 0;  ///< bytes that differ in all results together
  std::string result;      ///< the first result that differs
  std::string error;  ///< what an operator threw instead, for example because poison was read as an index; else empty
  /// The two operations whose order alone makes the difference, with the wait that would fix it.
  std::string pair;
};

/// What a search found.
struct ScheduleSearch {
  std::int64_t named = 0;     ///< schedules tried: the four with names
  std::int64_t starved = 0;   ///< schedules tried: one stream starved
  std::int64_t held = 0;      ///< schedules tried: one piece of work delayed; pairs that nothing orders come first
  std::int64_t seeds = 0;     ///< schedules tried: drawn from seeds
  std::int64_t orders = 0;    ///< different orders among them; no order is run twice
  std::int64_t diverged = 0;  ///< schedules under which results differed
  std::vector<Divergence> divergences;  ///< one for each pair of operations, at most 16
  double seconds = 0;                   ///< time that the search took

  /// All schedules tried.
  [[nodiscard]] std::int64_t tried() const noexcept { return named + starved + held + seeds; }
};

/// Records the work of the simulated device and runs it again, operator by operator, in other orders that streams and events allow. If the
/// bytes of a result depend on the order, a wait is missing.
///
///     sidestream::ScheduleCheck check(device);     // after the steps that size and capture
///     train_step();
///     check.stop({{"loss", loss}, {"weight", gradient.clone()}});
///     const sidestream::ScheduleSearch found = check.search(10000);
///
/// During the recording, backward runs on the calling thread, so that a seed gives the same order in every process. A rerun changes device
/// and pinned memory; the destructor restores the state at `stop`.
/// Threads: one.  Capture: illegal.
class SIDESTREAM_API ScheduleCheck {
 public:
  /// Tensors to compare, by name.
  using Results = std::vector<std::pair<std::string, at::Tensor>>;

  /// Starts the recording.  Throws: UsageError for another device than sim, and while another recording is being made.
  explicit ScheduleCheck(c10::Device sim);
  ScheduleCheck(const ScheduleCheck&) = delete;
  ScheduleCheck& operator=(const ScheduleCheck&) = delete;
  ~ScheduleCheck();

  /// Ends the recording. `results` are the tensors to compare: contiguous tensors on the device that hold what the recorded work wrote.
  /// Throws: UsageError for other tensors. Error if the recorded work, run again in the order of issue, does not give the same bytes:
  /// then host code wrote what the recorded work reads or returns.
  void stop(Results results);

  /// Number of pieces of work: operators, copies, records, frees, and each node of a graph.
  [[nodiscard]] std::int64_t works() const;
  /// Number of streams in the recording.
  [[nodiscard]] std::int64_t streams() const;
  /// Bytes of all results.
  [[nodiscard]] std::int64_t result_bytes() const;
  /// What check_order finds in the recording, one line for each pair that nothing orders.
  [[nodiscard]] std::vector<std::string> findings() const;

  /// Runs the recording under `schedule`. If results differ, finds the pair of operations that makes the difference.
  [[nodiscard]] std::optional<Divergence> run(const Schedule& schedule);
  /// Tries `schedules` schedules: the named ones; each stream starved; of each pair that nothing orders, one piece of work held back.
  /// Then another piece of work held back and a seed take turns. When all work was held back once, only seeds follow.
  /// `go_on`, if given, gets the number of schedules tried so far, and ends the search by returning false.
  /// Throws: UsageError if `schedules` is less than one.
  [[nodiscard]] ScheduleSearch search(std::int64_t schedules, const std::function<bool(std::int64_t)>& go_on = {});

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sidestream
