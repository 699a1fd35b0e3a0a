#pragma once
#include <deque>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "graphs/sandbox/rng_state_guard.h"
#include "graphs/sequence/captured_call.h"

namespace sidestream {

/// Gradients (hidden meanwhile), module buffers, the device's generator and those that the calls name, put back at the end.
/// Ordering: copies on the current stream.  Capture: illegal.  Threads: one.
class [[nodiscard]] StateKeeper {
 public:
  StateKeeper(const std::vector<CallSpec>& specs, c10::Device device);
  StateKeeper(const StateKeeper&) = delete;
  StateKeeper& operator=(const StateKeeper&) = delete;
  ~StateKeeper();

  /// The device's default generator first.
  [[nodiscard]] std::deque<RngStateGuard>& draws() noexcept { return draws_; }

 private:
  std::deque<RngStateGuard> draws_;
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_;
};

}  // namespace sidestream
