#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sidestream::cli {

/// How long copies and waits took in the step that a rank traced.
struct RankTimes {
  std::int64_t step = 0;       ///< the step that was traced, from 1
  double seconds = 0;          ///< of the whole step
  double waited_seconds = 0;   ///< that compute waited for copies
  double offload_seconds = 0;  ///< of the copies to the host
  double reload_seconds = 0;   ///< of the copies to the device
};

/// What one rank's engine did: the part of its report that a table of ranks shows.
struct RankReport {
  std::string file;  ///< where it was read from
  std::int64_t steps = 0;
  std::int64_t offloaded_bytes = 0;
  std::int64_t in_flight_bytes = 0;
  std::int64_t refused_bytes = 0;
  std::int64_t pinned_bytes = 0;
  std::int64_t sizing_peak_bytes = 0;
  std::int64_t step_peak_bytes = 0;
  std::int64_t waits = 0;
  std::int64_t inline_reloads = 0;
  std::int64_t replays = 0;
  std::int64_t eager_calls = 0;
  std::optional<RankTimes> times;  ///< not set if no step was traced, or if the device keeps no time
  std::vector<std::pair<std::string, std::int64_t>> kept;  ///< why bytes of the plan's groups stay, and how many
  std::vector<std::string> order_findings;
  std::vector<std::string> notes;
};

/// Reads what Report::json wrote.
/// Throws: UsageError for a text that is no whole report, a report of another version, and one that lacks a field.
[[nodiscard]] RankReport parse_rank_report(std::string_view text, const std::string& file);

/// One row for each rank, their sums, and what stays on the device. If a rank has times, a second table has them.
/// Throws: UsageError for ranks with different numbers of steps, and for a file that is there twice.
[[nodiscard]] std::string table_of_ranks(const std::vector<RankReport>& ranks);

}  // namespace sidestream::cli
