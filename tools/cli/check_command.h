#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "tools/cli/training_options.h"

namespace CLI {
class App;
}

namespace sidestream::cli {

/// What `sidestream check` was asked for: a journal to read, or schedules to run.
struct CheckOptions {
  CheckOptions();

  std::filesystem::path journal;          ///< empty: none
  std::optional<std::int64_t> schedules;  ///< how many to try
  std::string schedule;                   ///< the one to run; empty: none
  TrainingOptions training;               ///< the model, its placement, and how many steps are recorded
};

/// Declares the options of `sidestream check` on `command`; parsing fills `options`, which must outlive it.
void declare_check_options(CLI::App& command, CheckOptions& options);

/// `sidestream check`: findings and divergences on stdout. Returns the exit code: kFailure where there are any.
/// Throws: UsageError for a file that is no whole journal, for a number or a schedule that does not exist, and for options that
/// do not go together.
[[nodiscard]] int check(const CheckOptions& options);

}  // namespace sidestream::cli
