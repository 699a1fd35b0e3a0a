#include "graphs/engine/checked_options.h"

#include <cstdint>
#include <cstdlib>
#include <string>

#include "sidestream/error.h"

namespace sidestream {
namespace {

std::int64_t check_steps_by_environment() {
  const char* text = std::getenv("SIDESTREAM_CHECK_STEPS");
  if (text == nullptr || *text == 0) {
    return 0;
  }
  char* end = nullptr;
  const long long steps = std::strtoll(text, &end, 10);
  if (*end != 0 || steps < 0) {
    throw UsageError("SIDESTREAM_CHECK_STEPS is \"" + std::string(text) +
                     "\"; it must be a number of steps, 0 for none");
  }
  return steps;
}

}  // namespace

Options checked_options(Options options) {
  if (options.graph_options().side_streams() < 1) {
    throw UsageError("side_streams is " + std::to_string(options.graph_options().side_streams()) +
                     "; it must be at least 1 (K, default 2)");
  }
  if (options.groups_in_flight() < 0) {
    throw UsageError("groups_in_flight is negative; it must be 0 or more");
  }
  if (options.graph_options().on_pending() == OnChange::eager) {
    throw UsageError("GraphOptions::on_pending cannot be eager: it is capture or error");
  }
  if (options.graph_options().on_relocated_weights() == OnChange::eager) {
    throw UsageError("GraphOptions::on_relocated_weights cannot be eager: it is capture or error");
  }
  if (options.check_steps() == 0) {
    options.check_steps(check_steps_by_environment());
  }
  if (options.check_steps() < 0) {
    throw UsageError("check_steps is negative; it must be 0 (off) or a number of steps");
  }
  return options;
}

}  // namespace sidestream
