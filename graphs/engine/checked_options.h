#pragma once
#include "sidestream/options.h"

namespace sidestream {

/// `options` as an engine uses them: what the environment sets is filled in.
/// Throws: UsageError for values that make no sense.
[[nodiscard]] Options checked_options(Options options);

}  // namespace sidestream
