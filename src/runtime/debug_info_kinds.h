#pragma once
#include <c10/util/ThreadLocalDebugInfo.h>

namespace sidestream {

/// The kinds of Sidestream's entries in LibTorch's thread-local debug info. Two entries of one kind hide each other, so each user has a
/// kind here. LibTorch numbers its kinds from 0.
struct DebugInfoKinds {
  static constexpr auto operator_observer = static_cast<c10::DebugInfoKind>(0xA5);
  static constexpr auto capture_turn = static_cast<c10::DebugInfoKind>(0xA6);
  static constexpr auto nested_backward = static_cast<c10::DebugInfoKind>(0xA7);
  static constexpr auto sync_finder = static_cast<c10::DebugInfoKind>(0xA8);
};

}  // namespace sidestream
