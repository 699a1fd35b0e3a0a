#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sidestream::cli {

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
  std::vector<std::pair<std::string, std::int64_t>> kept;  ///< why bytes of the plan's groups stay, and how many
  std::vector<std::string> order_findings;
  std::vector<std::string> notes;
};

/// Reads what Report::json wrote.
/// Throws: UsageError for a text that is no whole report, a report of another version, and one that lacks a field.
[[nodiscard]] RankReport parse_rank_report(std::string_view text, const std::string& file);

/// One row for each rank, their sums, and what stays on the device.
/// Throws: UsageError for ranks with different numbers of steps, and for a file that is there twice.
[[nodiscard]] std::string table_of_ranks(const std::vector<RankReport>& ranks);

}  // namespace sidestream::cli
