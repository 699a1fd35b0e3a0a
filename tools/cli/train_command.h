#pragma once
#include "tools/cli/training_options.h"

namespace sidestream::cli {

/// The exit codes of the program.
inline constexpr int kSuccess = 0;
inline constexpr int kFailure = 1;
inline constexpr int kUsage = 2;
inline constexpr int kSignalled = 128;  ///< and the signal's number: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP

/// `sidestream train`: progress and the closing table on stdout. Returns the exit code.
/// Throws: UsageError for what the command line asks wrongly, Error and LibTorch's errors for what fails later.
[[nodiscard]] int train(const TrainingOptions& options);

}  // namespace sidestream::cli
