#pragma once
#include <cstdint>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace sidestream::testing_model {

/// A mixture of experts that are run one by one, each in a scope of its own ("experts.0", ...) on the tokens that its router sends there:
/// how many depends on the data and changes from step to step. What an expert saves is small.
class ExpertModel : public torch::nn::Module {
 public:
  static constexpr std::int64_t kExperts = 4;
  static constexpr std::int64_t kWidth = 16;

  ExpertModel();
  /// Of `tokens`, [count, kWidth].
  at::Tensor loss(const at::Tensor& tokens);

 private:
  at::Tensor layer(const at::Tensor& h, std::int64_t number);

  at::Tensor router_[2], in_[2], out_[2];
};

/// `count` tokens, the same for the same number.
[[nodiscard]] at::Tensor expert_tokens(std::int64_t number, std::int64_t count, c10::Device device);

}  // namespace sidestream::testing_model
