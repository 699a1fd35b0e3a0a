#pragma once
#include <ATen/autocast_mode.h>
#include <c10/core/DeviceType.h>

namespace sidestream::testing_model {

/// Autocast to bfloat16 while it lives, as a trainer sets it around forward.
class [[nodiscard]] AutocastRegion {
 public:
  explicit AutocastRegion(c10::DeviceType type, bool cache = true)
      : type_(type), cache_before_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_enabled(type_, true);
    at::autocast::set_autocast_dtype(type_, at::kBFloat16);
    at::autocast::set_autocast_cache_enabled(cache);
    at::autocast::increment_nesting();
  }
  AutocastRegion(const AutocastRegion&) = delete;
  AutocastRegion& operator=(const AutocastRegion&) = delete;
  ~AutocastRegion() {
    if (at::autocast::decrement_nesting() == 0) {
      at::autocast::clear_cache();
    }
    at::autocast::set_autocast_enabled(type_, false);
    at::autocast::set_autocast_cache_enabled(cache_before_);
  }

 private:
  c10::DeviceType type_;
  bool cache_before_;
};

}  // namespace sidestream::testing_model
