#pragma once
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace sidestream {

/// Whether operators of one device type cast, and to what, on the calling thread.
struct AutocastState {
  c10::DeviceType type = c10::DeviceType::CPU;
  bool enabled = false;
  c10::ScalarType dtype = c10::ScalarType::Float;

  [[nodiscard]] static AutocastState current(c10::DeviceType type);
  [[nodiscard]] bool operator==(const AutocastState& other) const noexcept {
    return type == other.type && enabled == other.enabled && (!enabled || dtype == other.dtype);
  }
};

/// Sets `state` for its lifetime. Casts of weights that autocast caches are made inside and do not outlive it: a capture must
/// neither read one from outside nor leave one of its own.
class [[nodiscard]] AutocastGuard {
 public:
  explicit AutocastGuard(const AutocastState& state);
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;
  ~AutocastGuard();

 private:
  static void set(const AutocastState& state);
  AutocastState before_;
};

}  // namespace sidestream
