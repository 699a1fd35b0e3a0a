#pragma once
#include <cstdint>

namespace sidestream::testing_model {

/// How often this program has called operator new, on any thread.
[[nodiscard]] std::int64_t heap_allocations() noexcept;
/// How often the calling thread has.
[[nodiscard]] std::int64_t heap_allocations_of_this_thread() noexcept;

}  // namespace sidestream::testing_model
