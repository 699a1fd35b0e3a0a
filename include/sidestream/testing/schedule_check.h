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

/// A schedule under which recorded work gives other bytes than in the order of issue.
struct Divergence {
  Schedule schedule;
  std::int64_t bytes = 0;  ///< that differ, over all results
  std::string result;      ///< the first result that differs
  std::string error;       ///< what an operator threw instead (poison taken for an index, for one); else empty
  /// The two operations whose order makes the difference, all else being equal, with the edge that would fix it.
  std::string pair;
};

/// What a search found.
struct ScheduleSearch {
  std::int64_t named = 0;    ///< schedules tried: the four with names,
  std::int64_t starved = 0;  ///< one stream starved,
  std::int64_t held = 0;     ///< one piece of work held back, those of pairs that nothing orders first,
  std::int64_t seeds = 0;    ///< drawn from seeds
  std::int64_t orders = 0;   ///< different orders among them; one that was run before is not run again
  std::int64_t diverged = 0;
  std::vector<Divergence> divergences;  ///< one for each pair, at most 16
  double seconds = 0;

  [[nodiscard]] std::int64_t tried() const noexcept { return named + starved + held + seeds; }
};

/// Records what the sim device is given to do, and runs it again in the orders that streams and events allow, operator by
/// operator: results whose bytes depend on the order show a wait that is missing.
///
///     sidestream::ScheduleCheck check(device);     // after the steps that size and capture
///     train_step();
///     check.stop({{"loss", loss}, {"weight", gradient.clone()}});
///     const sidestream::ScheduleSearch found = check.search(10000);
///
/// While it records, backward runs on the calling thread, so that a seed gives the same order in every process. A rerun changes
/// device and pinned memory; `stop`'s state is back when this object dies.
/// Threads: one.  Capture: illegal.
class SIDESTREAM_API ScheduleCheck {
 public:
  using Results = std::vector<std::pair<std::string, at::Tensor>>;

  /// Starts to record. Throws: UsageError for another device than sim, or while another recording is being made.
  explicit ScheduleCheck(c10::Device sim);
  ScheduleCheck(const ScheduleCheck&) = delete;
  ScheduleCheck& operator=(const ScheduleCheck&) = delete;
  ~ScheduleCheck();

  /// Ends the recording. `results` are compared: contiguous tensors on the device that hold, by now, what the recorded work
  /// left in them. Throws: UsageError for others; Error when the recorded work, run again as it was issued, does not give them
  /// (host code had a part in them).
  void stop(Results results);

  /// Pieces of work: operators, copies, records, frees, each node of a graph.
  [[nodiscard]] std::int64_t works() const;
  [[nodiscard]] std::int64_t streams() const;
  [[nodiscard]] std::int64_t result_bytes() const;
  /// The order check of what was recorded, one line for each pair that nothing orders.
  [[nodiscard]] std::vector<std::string> findings() const;

  /// Runs `schedule`, and shrinks a divergence to its pair.
  [[nodiscard]] std::optional<Divergence> run(const Schedule& schedule);
  /// Tries `schedules` schedules: the named ones, each stream starved, each piece of work held back in turn with seeds.
  /// `go_on`, if any, is told how many have been tried, and ends the search by returning false.
  /// Throws: UsageError for fewer than one.
  [[nodiscard]] ScheduleSearch search(std::int64_t schedules, const std::function<bool(std::int64_t)>& go_on = {});

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sidestream
