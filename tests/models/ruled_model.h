#pragma once
#include <cstdint>
#include <functional>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

namespace sidestream::testing_model {

/// A layer that does what its test says, and has what a capture may freeze.
class RuledLayer : public torch::nn::Module {
 public:
  using Rule = std::function<at::Tensor(RuledLayer& layer, const at::Tensor& x)>;
  explicit RuledLayer(Rule rule);
  at::Tensor forward(at::Tensor x);

  static constexpr std::int64_t kWidth = 4;

  at::Tensor weight;        ///< [kWidth], as are the others; ones
  at::Tensor extra;         ///< another parameter; ones
  at::Tensor running;       ///< a buffer; zeros
  at::Tensor unregistered;  ///< zeros; on the device from the first call on
  double member = 1;        ///< a plain member
  std::int64_t calls = 0;   ///< of forward, on the host

 private:
  Rule rule_;
};

/// `layers.0`, ... one after the other, called by ss::call.
class RuledModel : public torch::nn::Module {
 public:
  RuledModel(std::int64_t count, const RuledLayer::Rule& rule, c10::Device device);
  RuledLayer& layer(std::int64_t index);
  /// `x`: [rows, kWidth]; scaled by a parameter of the model, so that it requires a gradient and is no leaf.
  at::Tensor forward(const at::Tensor& x);

  torch::nn::ModuleList layers;

 private:
  at::Tensor scale_;
};

}  // namespace sidestream::testing_model
