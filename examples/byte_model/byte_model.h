#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/pimpl.h>

namespace byte_model {

/// Sizes of a byte-level transformer.
struct ModelShape {
  std::int64_t layers = 6;
  std::int64_t hidden = 96;
  std::int64_t heads = 4;
  std::int64_t kv_heads = 2;
  std::int64_t ffn = 256;
  std::int64_t seq = 128;
  bool attention_apart =
      false;  ///< a layer's attention half is a call of its own, "blocks.0.attention", and may be a graph alone

  [[nodiscard]] std::int64_t head_dim() const noexcept { return hidden / heads; }
};

/// Root-mean-square norm over the last dimension.
class RmsNormImpl : public torch::nn::Module {
 public:
  explicit RmsNormImpl(std::int64_t hidden);
  [[nodiscard]] at::Tensor forward(const at::Tensor& input);

 private:
  at::Tensor weight_;
};
TORCH_MODULE(RmsNorm);

/// A matrix product without bias; weights are drawn once, from a normal distribution of the given width.
class ProjectionImpl : public torch::nn::Module {
 public:
  ProjectionImpl(std::int64_t in, std::int64_t out, double std);
  [[nodiscard]] at::Tensor forward(const at::Tensor& input);

 private:
  at::Tensor weight_;
};
TORCH_MODULE(Projection);

/// One pre-norm layer: grouped-query causal attention with rotary positions, then a SwiGLU. [batch, seq, hidden] in and out.
class BlockImpl : public torch::nn::Module {
 public:
  /// The offload scopes of a block, in forward order.
  static constexpr std::array<std::string_view, 8> kScopes{"norm1", "qkv", "core_attn", "proj",
                                                           "norm2", "fc1", "act",       "fc2"};

  /// Those of its attention half.
  static constexpr std::array<std::string_view, 4> kAttentionScopes{"norm1", "qkv", "core_attn", "proj"};

  /// `attention`: the name of the attention half's call, where it is apart.
  explicit BlockImpl(const ModelShape& shape, std::string attention = {});
  /// `rope` is the model's cache of angles ([positions, head_dim]: cosines, then sines), null for no rotation; `start` is the
  /// position of the first byte.
  [[nodiscard]] at::Tensor forward(const at::Tensor& input, const at::Tensor* rope, std::int64_t start);

 private:
  /// The input, and what attention adds to it.
  [[nodiscard]] at::Tensor with_attention(const at::Tensor& input, const at::Tensor* rope, std::int64_t start);
  [[nodiscard]] at::Tensor attention(const at::Tensor& input, const at::Tensor* rope, std::int64_t start);

  ModelShape shape_;
  std::string attention_name_;
  RmsNorm norm1_{nullptr};
  RmsNorm norm2_{nullptr};
  Projection qkv_{nullptr};
  Projection proj_{nullptr};
  Projection fc1_{nullptr};
  Projection fc2_{nullptr};
};
TORCH_MODULE(Block);

/// Next-byte language model: embedding, blocks ("blocks.0", ...), norm, head.
class ByteModelImpl : public torch::nn::Module {
 public:
  /// Weights are drawn on the CPU from LibTorch's default generator: equal seeds give equal models on every device.
  explicit ByteModelImpl(const ModelShape& shape);
  /// Logits [batch, seq, 256] for `bytes` [batch, seq] of dtype int64.
  [[nodiscard]] at::Tensor forward(const at::Tensor& bytes);
  /// Mean cross entropy in nats per byte, a scalar; `windows` [batch, seq + 1], int64: each byte predicts the next.
  [[nodiscard]] at::Tensor loss(const at::Tensor& windows);

  /// For pipelines: what part `part` of `parts` gives, if the blocks are cut into `parts` rows of about equal length. The first part takes
  /// bytes and has the embedding. Other parts take what the part before them gave. The last part has norm and head, and gives logits.
  [[nodiscard]] at::Tensor forward_part(const at::Tensor& input, std::int64_t part, std::int64_t parts);
  /// Brings the parameters of that part to `device`. Those of other parts stay as they are.
  void place_part(std::int64_t part, std::int64_t parts, c10::Device device);
  /// The loss of logits, as `loss` computes it.
  [[nodiscard]] static at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& windows);

 private:
  /// The first block of a part, and the block after its last.
  [[nodiscard]] std::pair<std::size_t, std::size_t> blocks_of(std::int64_t part, std::int64_t parts) const;

  torch::nn::Embedding embedding_{nullptr};
  torch::nn::ModuleList blocks_{nullptr};
  RmsNorm norm_{nullptr};
  Projection head_{nullptr};
  at::Tensor rope_;
};
TORCH_MODULE(ByteModel);

}  // namespace byte_model
