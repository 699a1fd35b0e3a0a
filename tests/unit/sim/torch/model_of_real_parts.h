#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

namespace sidestream::test {

struct ModelShape {
  std::int64_t vocabulary = 64;
  std::int64_t layers = 2;
  std::int64_t hidden = 32;
  std::int64_t heads = 4;
  std::int64_t key_heads = 2;
  std::int64_t experts = 4;
  std::int64_t chosen_experts = 2;
  double dropout = 0.1;
};

/// Causal attention with fewer key and value heads than query heads.
class GroupedAttentionImpl : public torch::nn::Module {
 public:
  explicit GroupedAttentionImpl(const ModelShape& shape);
  at::Tensor forward(const at::Tensor& x);

 private:
  std::int64_t heads_, key_heads_, width_;
  torch::nn::Linear query_, key_value_, output_;
};
TORCH_MODULE(GroupedAttention);

/// A mixture of experts: each row goes to the experts that its router scores highest.
class ExpertsImpl : public torch::nn::Module {
 public:
  explicit ExpertsImpl(const ModelShape& shape);
  at::Tensor forward(const at::Tensor& x);

 private:
  std::int64_t chosen_;
  torch::nn::Linear router_;
  torch::nn::ModuleList up_, down_;
};
TORCH_MODULE(Experts);

class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const ModelShape& shape);
  at::Tensor forward(const at::Tensor& x);

 private:
  at::Tensor attention_norm_;
  GroupedAttention attention_;
  torch::nn::LayerNorm experts_norm_;
  Experts experts_;
  torch::nn::Dropout dropout_;
};
TORCH_MODULE(Block);

/// A small language model of the parts that real ones have.
class ModelImpl : public torch::nn::Module {
 public:
  explicit ModelImpl(const ModelShape& shape = {});
  /// Logits of int64 `tokens`.
  at::Tensor forward(const at::Tensor& tokens);
  [[nodiscard]] BlockImpl& block(std::size_t i) { return *blocks_->ptr<BlockImpl>(i); }

 private:
  torch::nn::Embedding embedding_;
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm norm_;
  torch::nn::Linear head_;
};
TORCH_MODULE(Model);

}  // namespace sidestream::test
