#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "habits/action.h"

namespace sidestream::habits {

/// What one process runs.
struct ShardOptions {
  std::uint64_t seed = 0;
  std::int64_t programs = 0;
  std::int64_t seconds = 0;  ///< after which no program begins; 0: no limit
  std::string device = "sim";
  int longest = 24;         ///< actions of a program
  std::vector<Kind> drawn;  ///< of what kinds
  std::vector<std::int64_t> forms;
  std::vector<std::int64_t> parts;
  std::string folder;  ///< for program.txt, failed.txt and statistics.txt
};

/// Runs random programs; where one fails, shrinks it. The program that runs is in program.txt, the smallest that failed in failed.txt.
/// False where one failed.
[[nodiscard]] bool run_shard(const ShardOptions& options);
/// Runs the program in `file` on `device`, and says on standard error what it does. False where it failed.
[[nodiscard]] bool replay(const std::string& file, const std::string& device);

}  // namespace sidestream::habits
