#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

#include <ATen/Functions.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

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

/// Waves "waves.0", "waves.1", ...: the same weights each time.
class Waves : public torch::nn::Module {
 public:
  explicit Waves(c10::Device device) {
    for (std::int64_t i = 0; i < kCount; ++i) {
      layers->push_back(Wave(i));
    }
    register_module("waves", layers);
    to(device);
  }
  [[nodiscard]] std::shared_ptr<Wave> layer(std::int64_t i) {
    return std::dynamic_pointer_cast<Wave>(layers[static_cast<std::size_t>(i)]);
  }
  static constexpr std::int64_t kCount = 8;
  torch::nn::ModuleList layers;
};

}  // namespace sidestream::testing_model
