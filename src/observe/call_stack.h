#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace sidestream {

/// The return addresses of the calling thread, innermost first. Only the first one of the process allocates.
class CallStack {
 public:
  CallStack() = default;
  /// Leaves out this function and `skip` frames around it.
  [[nodiscard]] static CallStack here(int skip);

  /// Names of at most `most` frames. The frames of this library are left out. So are the frames of LibTorch and CUDA between them and the
  /// first frame of other code, except the function that was called. A frame without a name is "module+0xoffset", as addr2line takes it.
  [[nodiscard]] std::vector<std::string> frames(std::size_t most) const;

  friend bool operator<(const CallStack& a, const CallStack& b) { return a.key() < b.key(); }

 private:
  static constexpr std::size_t kMost = 96;

  [[nodiscard]] std::uint64_t key() const noexcept { return hash_; }

  std::array<void*, kMost> addresses_{};
  std::size_t depth_ = 0;
  std::uint64_t hash_ = 0;
};

}  // namespace sidestream
