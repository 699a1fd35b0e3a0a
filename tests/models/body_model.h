#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

#include "models/plain_twin.h"
#include "sidestream/engine.h"

namespace sidestream::testing_model {

/// A block whose body a test gives. `kept` and `other` are members that nothing registers; steps compare `kept`.
class BodyBlock : public torch::nn::Module {
 public:
  using Body = std::function<at::Tensor(BodyBlock& block, const at::Tensor& x)>;
  BodyBlock(std::int64_t hidden, Body given);
  at::Tensor forward(const at::Tensor& x) { return body(*this, x); }

  Body body;
  at::Tensor weight;  ///< [hidden, hidden], a parameter
  at::Tensor kept, other;
};

/// Blocks called one after the other by ss::call, "blocks.0" and so on, between two weights.
class BodyModel : public torch::nn::Module {
 public:
  /// One block for each body. The same weights each time.
  BodyModel(c10::Device device, const std::vector<BodyBlock::Body>& bodies, std::int64_t hidden = 16);
  at::Tensor forward(const at::Tensor& x);
  /// A step of a trainer on [batch, length, hidden] data of step `s`: gradients, buffers, `kept` of all blocks, and the loss.
  StepTensors step(OffloadEngine* engine, std::int64_t s, std::int64_t length = 8, std::int64_t batch = 2);
  [[nodiscard]] BodyBlock& block(std::size_t i) { return *blocks->ptr<BodyBlock>(i); }
  [[nodiscard]] at::Tensor data(std::int64_t s, std::int64_t length, std::int64_t batch, std::int64_t salt = 0) const;

  torch::nn::ModuleList blocks;
  at::Tensor first, last;  ///< parameters

 private:
  std::int64_t hidden_;
  c10::Device device_;
};

/// A model of `bodies` and its plain twin.
struct BodyTwins {
  BodyTwins(c10::Device device, const std::vector<BodyBlock::Body>& bodies)
      : mine(device, bodies), plain(device, bodies) {}
  /// Steps first..last-1 of both give the same.
  void expect_plain(OffloadEngine& engine, std::int64_t first, std::int64_t last, std::int64_t length = 8,
                    std::int64_t batch = 2);

  BodyModel mine, plain;
};

}  // namespace sidestream::testing_model
