#pragma once
#include <cstddef>
#include <cstring>
#include <vector>

namespace sidestream::sim {

/// Bytes of memory that must not be read: NaN in every floating type, -1 in every integer.
inline constexpr int poison_byte = 0xff;

/// A copy of a range of device or pinned memory, to be put back.
struct MemoryImage {
  MemoryImage(std::byte* from, std::size_t count) : begin(from), bytes(from, from + count) {}
  void restore() const { std::memcpy(begin, bytes.data(), bytes.size()); }
  [[nodiscard]] bool covers(const std::byte* from, std::size_t count) const noexcept {
    return from >= begin && from + count <= begin + bytes.size();
  }

  std::byte* begin;
  std::vector<std::byte> bytes;
};

}  // namespace sidestream::sim
