#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

#include "models/plain_twin.h"
#include "sidestream/engine.h"

namespace sidestream::testing_model {

/// A transformer block of real parts, with offload scopes; takes a tensor, a pointer and an integer.
class Block : public torch::nn::Module {
 public:
  Block(std::int64_t hidden, std::int64_t heads, double dropout);
  at::Tensor forward(at::Tensor h, const at::Tensor* positions, std::int64_t start);

 private:
  std::int64_t hidden_;
  std::int64_t heads_;
  double dropout_;
  at::Tensor norm1_, norm2_, qkv_, proj_, fc1_, fc2_;
};

/// Embedding, blocks called by ss::call, head and loss.
class BlockModel : public torch::nn::Module {
 public:
  struct Shape {
    std::int64_t layers = 4;
    std::int64_t hidden = 32;
    std::int64_t heads = 2;
    std::int64_t sequence = 16;
    std::int64_t batch = 2;
    double dropout = 0.0;
  };
  explicit BlockModel(const Shape& shape);

  /// Mean loss of predicting `targets` from `tokens`, both [batch, sequence].
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets, std::int64_t start = 0);
  /// Of the data of step `s`.
  at::Tensor loss_of(std::int64_t s, std::int64_t start = 0);
  [[nodiscard]] const Shape& shape() const { return shape_; }

  torch::nn::ModuleList blocks;

 private:
  Shape shape_;
  at::Tensor embedding_, positions_, head_;
};

/// Tokens and targets of step `step`, the same for the same step.
struct Batch {
  at::Tensor tokens, targets;
};
Batch batch_of(const BlockModel::Shape& shape, std::int64_t step, c10::Device device);

/// Trains a new model of `shape` on the steps 0..steps-1, with the engine that `engine` makes for it or plainly.
struct BlockTraining {
  BlockTraining(const BlockModel::Shape& shape, c10::Device device, std::int64_t steps,
                const std::function<std::unique_ptr<OffloadEngine>(BlockModel&)>& engine = {});
  std::vector<StepTensors> steps;  ///< gradients, buffers and loss
  Report report;                   ///< the engine's
};

/// Each step bit for bit as in plain training.
void expect_plain(const BlockTraining& mine, const BlockTraining& plain);

}  // namespace sidestream::testing_model
