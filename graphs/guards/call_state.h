#pragma once
#include <memory>

#include "graphs/guards/call_modes.h"
#include "graphs/guards/module_facts.h"

namespace sidestream {

/// The state that a call ran in. Its capture runs in the same state, whatever surrounds the capture, and replays only in it.
struct CallState {
  CallModes modes;
  CallModes backward_modes;  ///< of its backward; without autocast, if no backward has been seen
  ModuleFacts modules;       ///< of its module; of the model for a plain function

  /// As it is now, on the calling thread.
  [[nodiscard]] static CallState current(c10::DeviceType type, std::shared_ptr<const torch::nn::Module> module) {
    const CallModes modes = CallModes::current(type);
    return {modes, modes.without_autocast(), ModuleFacts(std::move(module))};
  }
};

/// Sets the modes and flags of the forward for its lifetime.
class [[nodiscard]] ForwardStateGuard {
 public:
  explicit ForwardStateGuard(const CallState& state) : flags_(state.modules), modes_(state.modes) {}

 private:
  ModelFlagsGuard flags_;
  CallModesGuard modes_;
};

/// Sets the modes and flags of the backward for its lifetime.
class [[nodiscard]] BackwardStateGuard {
 public:
  explicit BackwardStateGuard(const CallState& state) : flags_(state.modules), modes_(state.backward_modes) {}

 private:
  ModelFlagsGuard flags_;
  CallModesGuard modes_;
};

}  // namespace sidestream
