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

/// Gives each call the generators that `options` name beside its own, each once, without the default one of `device`.
/// Throws: UsageError for a generator of another device.
void name_generators(std::vector<CallSpec>& specs, const GraphOptions& options, c10::Device device);

/// All that `specs` name, each once, behind the default generator of `device`.
[[nodiscard]] std::vector<at::Generator> generators_of(const std::vector<CallSpec>& specs, c10::Device device);

}  // namespace sidestream
