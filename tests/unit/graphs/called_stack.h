#pragma once
#include <cstddef>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "models/layer_stack.h"
#include "sidestream/call.h"

namespace sidestream::testing_model {

/// Layers, each called by itself.
class CalledStack : public torch::nn::Module {
 public:
  explicit CalledStack(c10::Device device, const Mlp::Extras& extras = {}, std::int64_t count = 3)
      : layers(layer_stack(count, device, extras)) {
    register_module("layers", layers);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = x;
    for (std::size_t i = 0; i < layers->size(); ++i) {
      h = run_layer(i, h);
    }
    return h;
  }
  at::Tensor run_layer(std::size_t i, const at::Tensor& x) { return call(&layers->at<Mlp>(i), x); }
  torch::nn::Sequential layers;
};

}  // namespace sidestream::testing_model
