#pragma once
#include <cstddef>
#include <cstdint>

namespace sidestream {

/// A set of a call's outputs; those from the 64th on share one bit.
using OutputSet = std::uint64_t;

inline constexpr OutputSet all_outputs = ~OutputSet{0};

[[nodiscard]] constexpr OutputSet output_bit(std::size_t output) noexcept {
  return OutputSet{1} << (output < 63 ? output : 63);
}

}  // namespace sidestream
