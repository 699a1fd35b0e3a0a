#pragma once
#include <memory>

#include <c10/util/ThreadLocalDebugInfo.h>

#include "runtime/debug_info_kinds.h"

namespace sidestream {

/// While one lives, a `backward()` from inside a backward pass (a user's own checkpoint) throws CaptureError: it would accumulate into
/// leaves, which a capture must not do. Guards the backwards that warm up and capture graphs.
/// Threads: the refusal holds for its own thread, and for autograd's threads while they run that thread's backward passes. It travels with
/// LibTorch's thread-local state. Backwards of other threads are not affected.
class [[nodiscard]] NestedBackwardRefusal {
 public:
  NestedBackwardRefusal() : carried_(DebugInfoKinds::nested_backward, std::make_shared<c10::DebugInfoBase>()) {}
  NestedBackwardRefusal(const NestedBackwardRefusal&) = delete;
  NestedBackwardRefusal& operator=(const NestedBackwardRefusal&) = delete;
  ~NestedBackwardRefusal() = default;

  [[nodiscard]] static bool holds_here() noexcept {
    return c10::ThreadLocalDebugInfo::get(DebugInfoKinds::nested_backward) != nullptr;
  }

 private:
  c10::DebugInfoGuard carried_;
};

}  // namespace sidestream
