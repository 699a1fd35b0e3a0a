#pragma once
#include <string>

#include "sidestream/testing/schedule_check.h"
#include "tools/cli/check_command.h"

namespace sidestream::cli {

/// `sidestream check --schedules N` and `--schedule NAME`: trains two steps, records the next, and runs them again in other
/// orders. Returns the exit code: kFailure for a divergence or an access that nothing orders.
[[nodiscard]] int check_schedules(const CheckOptions& options);

/// What a search did, for people.
[[nodiscard]] std::string search_summary(const ScheduleSearch& found);
/// A divergence, for people, with how to see it again.
[[nodiscard]] std::string divergence_words(const Divergence& divergence);

}  // namespace sidestream::cli
