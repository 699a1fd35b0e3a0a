#pragma once
#include <cstdint>

namespace sidestream::testing_model {

/// How often this program has called operator new, on any thread.
[[nodiscard]] std::int64_t heap_allocations() noexcept;

}  // namespace sidestream::testing_model
