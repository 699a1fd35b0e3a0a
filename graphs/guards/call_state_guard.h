#pragma once
#include "graphs/guards/call_modes_guard.h"
#include "graphs/guards/call_state.h"

namespace sidestream {

/// The modes of `state`'s forward, for its lifetime.
class [[nodiscard]] ForwardStateGuard {
 public:
  explicit ForwardStateGuard(const CallState& state) : flags_(state.modules), modes_(state.modes) {}

 private:
  ModelFlagsGuard flags_;
  CallModesGuard modes_;
};

/// The modes of `state`'s backward, for its lifetime.
class [[nodiscard]] BackwardStateGuard {
 public:
  explicit BackwardStateGuard(const CallState& state) : flags_(state.modules), modes_(state.backward_modes) {}

 private:
  ModelFlagsGuard flags_;
  CallModesGuard modes_;
};

}  // namespace sidestream
