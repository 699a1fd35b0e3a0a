#pragma once
#include <cstdint>
#include <cstring>

#include <ATen/core/Tensor.h>

namespace sidestream {

/// True if both are one counter: of one tensor, of its views and of what was detached from it.
[[nodiscard]] inline bool is_same(const c10::VariableVersion& a, const c10::VariableVersion& b) noexcept {
  // VariableVersion is one intrusive pointer and offers no comparison.
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): one pointer has no padding
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

/// The version counter of a saved tensor, shared with it: autograd skips its own check for hooked tensors. An inference tensor has none.
class VersionStamp {
 public:
  VersionStamp() = default;
  explicit VersionStamp(const at::Tensor& tensor);
  [[nodiscard]] bool unchanged() const noexcept {
    return !counter_.enabled() || counter_.current_version() == version_;
  }
  /// From here on, `tensor` shares the counter.
  void put_on(const at::Tensor& tensor) const;
  /// Of the same family of tensors (views share a counter) and not written in between.
  [[nodiscard]] bool same_as(const VersionStamp& other) const noexcept;

 private:
  c10::VariableVersion counter_;
  std::uint32_t version_ = 0;
};

}  // namespace sidestream
