#pragma once
#include "runtime/weak_storage_set.h"
#include "sidestream/capture_time_hooks.h"

namespace sidestream {

/// Runs the hooks of one callable around its passes. Nothing of theirs is recorded, sized, or put back as a pass's own; what they
/// touch may be read by a capture.
/// Capture: illegal, but for `none`.
class PassHooks {
 public:
  /// Both must outlive this object; `hooks` may be null.
  PassHooks(const CaptureTimeHooks* hooks, WeakStorageSet& met) noexcept : hooks_(hooks), met_(met) {}

  void before_forward() const;
  void after_forward() const;
  void before_backward() const;
  void after_backward() const;

 private:
  void run(const std::function<void()>& hook) const;

  const CaptureTimeHooks* hooks_;
  WeakStorageSet& met_;
};

}  // namespace sidestream
