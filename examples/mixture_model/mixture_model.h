#pragma once
#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/pimpl.h>

namespace mixture_model {

/// Sizes of a byte-level transformer whose feed-forward layers are mixtures of experts.
struct MixtureShape {
  std::int64_t layers = 4;
  std::int64_t hidden = 96;
  std::int64_t heads = 4;
  std::int64_t kv_heads = 2;
  std::int64_t ffn = 128;  ///< inner width of one expert
  std::int64_t seq = 128;
  std::int64_t experts = 4;
  std::int64_t top_k = 2;  ///< experts that each byte is given to
  /// 0: each expert takes all that is given to it, so that its shapes depend on data and the host reads how many they are. Else each
  /// takes this part of an even share and no more, shapes are fixed and the host reads nothing: the whole layer may be one graph.
  double capacity = 0;
  double balance_weight = 0.01;  ///< of the load-balancing loss

  [[nodiscard]] std::int64_t head_dim() const noexcept { return hidden / heads; }
};

/// What comes before the experts: attention with its residual, norms, and the router. Its shapes are fixed: one graph.
class FrontImpl : public torch::nn::Module {
 public:
  explicit FrontImpl(const MixtureShape& shape);
  /// From `input` [batch, seq, hidden]: the residual stream [tokens, hidden], what the experts are given of it (normed), each token's
  /// weights [tokens, top_k] and experts [tokens, top_k], int64, and the load-balancing loss, a scalar.
  /// `rope` is the model's cache of angles ([positions, head_dim]: cosines, then sines).
  [[nodiscard]] std::vector<at::Tensor> forward(const at::Tensor& input, const at::Tensor* rope);

 private:
  [[nodiscard]] at::Tensor attention(const at::Tensor& input, const at::Tensor& rope);

  MixtureShape shape_;
  at::Tensor norm1_, qkv_, proj_, norm2_, router_;
};
TORCH_MODULE(Front);

/// SwiGLU experts, and the way of tokens to them and back.
class ExpertsImpl : public torch::nn::Module {
 public:
  explicit ExpertsImpl(const MixtureShape& shape);
  /// [tokens, hidden]: for each of `tokens` the weighted sum of what its experts give. See MixtureShape::capacity.
  [[nodiscard]] at::Tensor forward(const at::Tensor& tokens, const at::Tensor& weights, const at::Tensor& chosen);

 private:
  [[nodiscard]] at::Tensor as_many_as_come(const at::Tensor& tokens, const at::Tensor& weights,
                                           const at::Tensor& chosen);
  [[nodiscard]] at::Tensor up_to_capacity(const at::Tensor& tokens, const at::Tensor& weights,
                                          const at::Tensor& chosen);

  MixtureShape shape_;
  at::Tensor up_, down_;  ///< [experts, 2 * ffn, hidden] and [experts, hidden, ffn]
};
TORCH_MODULE(Experts);

/// One layer, [batch, seq, hidden] in and out: "front", then "experts".
class MixtureBlockImpl : public torch::nn::Module {
 public:
  /// The offload scopes of the two, in forward order.
  static constexpr std::array<std::string_view, 6> kFrontScopes{"norm1", "qkv", "core_attn", "proj", "norm2", "router"};
  static constexpr std::array<std::string_view, 5> kExpertScopes{"permute", "fc1", "act", "fc2", "combine"};

  explicit MixtureBlockImpl(const MixtureShape& shape);
  /// The layer's output, and its load-balancing loss.
  [[nodiscard]] std::vector<at::Tensor> forward(const at::Tensor& input, const at::Tensor* rope);

 private:
  Front front_{nullptr};
  Experts experts_{nullptr};
};
TORCH_MODULE(MixtureBlock);

/// Next-byte language model: embedding, layers ("blocks.0", with "blocks.0.front" and "blocks.0.experts"), norm, head.
class MixtureModelImpl : public torch::nn::Module {
 public:
  /// Weights are drawn on the CPU from LibTorch's default generator: equal seeds give equal models on every device.
  explicit MixtureModelImpl(const MixtureShape& shape);
  /// Logits [batch, seq, 256] for `bytes` [batch, seq] of dtype int64, and the layers' load-balancing loss.
  [[nodiscard]] std::vector<at::Tensor> forward(const at::Tensor& bytes);
  /// Mean cross entropy in nats per byte, a scalar; `windows` [batch, seq + 1], int64: each byte predicts the next.
  [[nodiscard]] at::Tensor cross_entropy(const at::Tensor& windows);
  /// The same with the weighted load-balancing loss: what is trained.
  [[nodiscard]] at::Tensor loss(const at::Tensor& windows);

 private:
  MixtureShape shape_;
  torch::nn::Embedding embedding_{nullptr};
  torch::nn::ModuleList blocks_{nullptr};
  at::Tensor norm_, head_, rope_;
};
TORCH_MODULE(MixtureModel);

}  // namespace mixture_model
