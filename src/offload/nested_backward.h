#pragma once
#include <memory>

#include <c10/util/ThreadLocalDebugInfo.h>

namespace sidestream {

/// While one lives, a `backward()` from inside a backward pass (a checkpoint of the user's own) throws CaptureError: it would
/// accumulate into leaves, which a capture must not do. It stands around the backwards that warm up and capture graphs.
/// Threads: the refusal holds for the thread that has it, and for autograd's threads while they run its backward passes: it travels
/// with LibTorch's thread-local state. Other threads' backwards are as ever.
class [[nodiscard]] NestedBackwardRefusal {
 public:
  NestedBackwardRefusal() : carried_(kKind, std::make_shared<c10::DebugInfoBase>()) {}
  NestedBackwardRefusal(const NestedBackwardRefusal&) = delete;
  NestedBackwardRefusal& operator=(const NestedBackwardRefusal&) = delete;
  ~NestedBackwardRefusal() = default;

  [[nodiscard]] static bool holds_here() noexcept { return c10::ThreadLocalDebugInfo::get(kKind) != nullptr; }

 private:
  static constexpr auto kKind =
      static_cast<c10::DebugInfoKind>(0xA7);  // beside the operator observer's and the capture turn's
  c10::DebugInfoGuard carried_;
};

}  // namespace sidestream
