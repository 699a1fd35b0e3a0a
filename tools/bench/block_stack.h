#pragma once
#include <cstdint>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

#include "examples/byte_model/byte_model.h"
#include "sidestream/call.h"

namespace sidestream::bench {

/// Transformer layers alone, without embedding and head: calls "blocks.0", ..., what the engine works on.
class BlockStack : public torch::nn::Module {
 public:
  explicit BlockStack(const byte_model::ModelShape& shape) {
    blocks_ = register_module("blocks", torch::nn::ModuleList());
    for (std::int64_t i = 0; i < shape.layers; ++i) {
      blocks_->push_back(byte_model::Block(shape));
    }
  }
  at::Tensor forward(at::Tensor h) {
    for (std::int64_t i = 0; i < layers(); ++i) {
      h = forward_layer(i, h);
    }
    return h;
  }
  [[nodiscard]] std::int64_t layers() const { return static_cast<std::int64_t>(blocks_->size()); }
  at::Tensor forward_layer(std::int64_t i, const at::Tensor& h) {
    constexpr const at::Tensor* kNoRope = nullptr;
    return call(blocks_[static_cast<std::size_t>(i)]->as<byte_model::Block>(), h, stays(kNoRope), std::int64_t{0});
  }

 private:
  torch::nn::ModuleList blocks_{nullptr};
};

}  // namespace sidestream::bench
