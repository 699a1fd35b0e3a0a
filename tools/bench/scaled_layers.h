#pragma once
#include <cstdint>
#include <memory>

#include <ATen/ops/ones.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

#include "sidestream/call.h"

namespace sidestream::bench {

/// A layer of one weight, so small that the device is never what limits.
class Scaled : public torch::nn::Module {
 public:
  static constexpr std::int64_t kElements = 8;

  Scaled() : weight_(register_parameter("weight", at::ones({kElements}))) {}
  at::Tensor forward(const at::Tensor& h) { return h * weight_; }

 private:
  at::Tensor weight_;
};

/// Such layers one after the other, "blocks.0" and so on, each in a call of its own.
class ScaledLayers : public torch::nn::Module {
 public:
  explicit ScaledLayers(std::int64_t layers) {
    for (std::int64_t i = 0; i < layers; ++i) {
      blocks_->push_back(std::make_shared<Scaled>());
    }
    register_module("blocks", blocks_);
  }
  at::Tensor forward(at::Tensor h) {
    for (const auto& block : *blocks_) {
      h = call(block->as<Scaled>(), h);
    }
    return h;
  }

 private:
  torch::nn::ModuleList blocks_;
};

}  // namespace sidestream::bench
