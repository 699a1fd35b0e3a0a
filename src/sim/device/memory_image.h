#pragma once
#include <algorithm>
#include <array>
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
  /// Puts the bytes back and keeps those that were there instead.
  void swap() {
    std::array<std::byte, 4096> piece;  // stays in the cache
    for (std::size_t at = 0; at < bytes.size(); at += piece.size()) {
      const std::size_t count = std::min(piece.size(), bytes.size() - at);
      std::memcpy(piece.data(), begin + at, count);
      std::memcpy(begin + at, bytes.data() + at, count);
      std::memcpy(bytes.data() + at, piece.data(), count);
    }
  }
  [[nodiscard]] bool covers(const std::byte* from, std::size_t count) const noexcept {
    return from >= begin && from + count <= begin + bytes.size();
  }

  std::byte* begin;
  std::vector<std::byte> bytes;
};

}  // namespace sidestream::sim
