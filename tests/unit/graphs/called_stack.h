#pragma once
#include <cstddef>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "models/layer_stack.h"
#include "sidestream/call.h"

namespace sidestream::testing_model {

/// Three layers, each called by itself.
class CalledStack : public torch::nn::Module {
 public:
  explicit CalledStack(c10::Device device, const Mlp::Extras& extras = {}) : layers(layer_stack(3, device, extras)) {
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
