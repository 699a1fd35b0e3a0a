#pragma once
#include <deque>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "graphs/guards/call_spec.h"
#include "graphs/sandbox/rng_state_guard.h"
#include "sidestream/graph_options.h"

namespace sidestream {

/// Puts back gradients (hidden meanwhile), module buffers, the device's generator and the generators that the calls name.
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

/// Adds to each call's own generators those that `options` name, each once, without the default one of `device`.
/// Throws: UsageError for a generator of another device.
void name_generators(std::vector<CallSpec>& specs, const GraphOptions& options, c10::Device device);

/// The default generator of `device`, then all that `specs` name, each once.
[[nodiscard]] std::vector<at::Generator> generators_of(const std::vector<CallSpec>& specs, c10::Device device);

}  // namespace sidestream
