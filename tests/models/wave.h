#pragma once
#include <cstdint>

#include <ATen/Functions.h>
#include <torch/nn/module.h>

#include "models/layer_stack.h"

namespace sidestream::testing_model {

/// A layer that saves nothing of what it is given, nor of what it gives: memory of its input is used again as soon as it has run.
class Wave : public torch::nn::Module {
 public:
  explicit Wave(std::int64_t salt) {
    auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(31 + salt));
    shift_ = register_parameter("shift", at::randn({kHidden}, generator));
    scale_ = register_parameter("scale", at::randn({kHidden}, generator));
  }
  at::Tensor forward(const at::Tensor& h) { return (h + shift_).sin() * scale_; }

 private:
  at::Tensor shift_, scale_;
};

}  // namespace sidestream::testing_model
