#pragma once
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "graphs/capture/draws_apart.h"
#include "graphs/replay/layer.h"

namespace sidestream {

/// Gradients (hidden meanwhile), module buffers and the device's generator, put back at the end.
/// Ordering: copies on the current stream.  Capture: illegal.  Threads: one.
class [[nodiscard]] StateKeeper {
 public:
  StateKeeper(const std::vector<LayerSpec>& specs, c10::Device device);
  StateKeeper(const StateKeeper&) = delete;
  StateKeeper& operator=(const StateKeeper&) = delete;
  ~StateKeeper();

  [[nodiscard]] DrawsApart& draws() noexcept { return draws_; }

 private:
  DrawsApart draws_;
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_;
};

}  // namespace sidestream
