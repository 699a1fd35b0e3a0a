#pragma once
#include <string_view>

#include "sidestream/detail/export.h"

namespace sidestream {

/// True if the operator `name` ("aten::native_batch_norm") writes its argument `argument` although its schema does not mark
/// it. `flag`, if asked for, gets the boolean argument without which it does not; empty if it always does. One table,
/// which the simulated device's schema audit keeps complete. Threads: any.
[[nodiscard]] SIDESTREAM_API bool writes_unmarked(std::string_view name, std::string_view argument,
                                                  std::string_view* flag = nullptr) noexcept;

}  // namespace sidestream
