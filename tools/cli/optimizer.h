#pragma once
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/adamw.h>

#include "sidestream/adamw.h"

namespace sidestream::cli {

/// AdamW: LibTorch's, or where a graph is to hold the update, the library's own, eager and captured. The two round differently.
class Optimizer {
 public:
  Optimizer(const std::vector<at::Tensor>& parameters, double weight_decay, bool for_a_graph);

  /// From the next update on.
  void set_lr(double lr);
  void step();
  /// Sets `.grad` of all parameters to none.
  void zero_grad();

 private:
  std::optional<torch::optim::AdamW> plain_;  ///< one of the two
  std::optional<AdamW> capturable_;
};

}  // namespace sidestream::cli
