#pragma once
#include <string>

#include "tools/cli/simulate_command.h"

namespace sidestream::cli {

/// Chrome's trace events: a process for each rank, with threads for compute and both directions of copies, and a counter of live memory.
[[nodiscard]] std::string trace_of(const SimulatedRanks& simulated);
/// The figures of the table.
[[nodiscard]] std::string json_of(const SimulatedRanks& simulated, const PipelineCosts& costs);
/// For each rank rows of its work, its copies and its live memory.
[[nodiscard]] std::string picture_of(const SimulatedRanks& simulated, const std::string& title,
                                     const std::string& words);

}  // namespace sidestream::cli
