#include "byte_model.h"

#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <c10/core/GradMode.h>
#include <sidestream/call.h>
#include <sidestream/scope.h>

namespace ss = sidestream;

namespace byte_model {
namespace {

constexpr std::int64_t kBytes = 256;
constexpr double kWeightStd = 0.02;
constexpr double kNormEpsilon = 1e-6;
constexpr double kRopeBase = 10000;

at::Tensor rope_cache(std::int64_t positions, std::int64_t head_dim) {
  const at::Tensor frequency =
      at::arange(0, head_dim, 2, at::kDouble).mul_(-std::log(kRopeBase) / static_cast<double>(head_dim)).exp_();
  const at::Tensor angle = at::outer(at::arange(positions, at::kDouble), frequency);
  return at::cat({angle.cos(), angle.sin()}, 1).to(at::kFloat);
}

/// Rotates pairs (i, i + dim/2) of x [batch, seq, heads, dim] by the angle of their position.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cosine, const at::Tensor& sine) {
  const std::vector<at::Tensor> half = x.chunk(2, -1);
  return at::cat({half[0] * cosine - half[1] * sine, half[1] * cosine + half[0] * sine}, -1);
}

}  // namespace

RmsNormImpl::RmsNormImpl(std::int64_t hidden) { weight_ = register_parameter("weight", at::ones({hidden})); }

at::Tensor RmsNormImpl::forward(const at::Tensor& input) {
  return at::rms_norm(input, weight_.sizes(), weight_, kNormEpsilon);
}

ProjectionImpl::ProjectionImpl(std::int64_t in, std::int64_t out, double std) {
  weight_ = register_parameter("weight", at::empty({out, in}).normal_(0, std));
}

at::Tensor ProjectionImpl::forward(const at::Tensor& input) { return at::linear(input, weight_); }

BlockImpl::BlockImpl(const ModelShape& shape, std::string attention)
    : shape_(shape), attention_name_(std::move(attention)) {
  // Two branches a layer add to the residual stream; scaled so that its variance does not grow with depth.
  const double branch_std = kWeightStd / std::sqrt(2.0 * static_cast<double>(shape.layers));
  const std::int64_t kv_width = shape.kv_heads * shape.head_dim();
  norm1_ = register_module("norm1", RmsNorm(shape.hidden));
  qkv_ = register_module("qkv", Projection(shape.hidden, shape.hidden + 2 * kv_width, kWeightStd));
  proj_ = register_module("proj", Projection(shape.hidden, shape.hidden, branch_std));
  norm2_ = register_module("norm2", RmsNorm(shape.hidden));
  fc1_ = register_module("fc1", Projection(shape.hidden, 2 * shape.ffn, kWeightStd));
  fc2_ = register_module("fc2", Projection(shape.ffn, shape.hidden, branch_std));
}

at::Tensor BlockImpl::attention(const at::Tensor& input, const at::Tensor* rope, std::int64_t start) {
  const std::int64_t batch = input.size(0);
  const std::int64_t seq = input.size(1);
  const std::int64_t dim = shape_.head_dim();
  const std::int64_t kv_width = shape_.kv_heads * dim;
  at::Tensor q;
  at::Tensor k;
  at::Tensor v;
  {
    ss::OffloadScope scope("qkv");
    const std::vector<at::Tensor> parts =
        qkv_->forward(input).split_with_sizes({shape_.hidden, kv_width, kv_width}, -1);
    q = parts[0].view({batch, seq, shape_.heads, dim});
    k = parts[1].view({batch, seq, shape_.kv_heads, dim});
    v = parts[2].view({batch, seq, shape_.kv_heads, dim});
    if (rope != nullptr) {
      const at::Tensor angles = rope->narrow(0, start, seq).unsqueeze(1);
      const at::Tensor cosine = angles.narrow(-1, 0, dim / 2);
      const at::Tensor sine = angles.narrow(-1, dim / 2, dim / 2);
      q = rotate(q, cosine, sine);
      k = rotate(k, cosine, sine);
    }
  }
  ss::OffloadScope scope("core_attn");
  const bool grouped = shape_.kv_heads != shape_.heads;
  return at::scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), /*attn_mask=*/{},
                                          /*dropout_p=*/0.0,
                                          /*is_causal=*/true, /*scale=*/std::nullopt, grouped)
      .transpose(1, 2)
      .reshape({batch, seq, shape_.hidden});
}

at::Tensor BlockImpl::with_attention(const at::Tensor& input, const at::Tensor* rope, std::int64_t start) {
  at::Tensor h;
  {
    ss::OffloadScope scope("norm1");
    h = norm1_->forward(input);
  }
  h = attention(h, rope, start);
  {
    ss::OffloadScope scope("proj");
    h = proj_->forward(h);
  }
  return input + h;
}

at::Tensor BlockImpl::forward(const at::Tensor& input, const at::Tensor* rope, std::int64_t start) {
  const at::Tensor residual = attention_name_.empty() ? with_attention(input, rope, start)
                                                      : ss::call(attention_name_.c_str(), &BlockImpl::with_attention,
                                                                 *this, input, ss::stays(rope), start);
  at::Tensor h;
  {
    ss::OffloadScope scope("norm2");
    h = norm2_->forward(residual);
  }
  {
    ss::OffloadScope scope("fc1");
    h = fc1_->forward(h);
  }
  {
    ss::OffloadScope scope("act");
    const std::vector<at::Tensor> half = h.chunk(2, -1);
    h = at::silu(half[0]) * half[1];
  }
  ss::OffloadScope scope("fc2");
  return residual + fc2_->forward(h);
}

ByteModelImpl::ByteModelImpl(const ModelShape& shape) {
  embedding_ = register_module("embedding", torch::nn::Embedding(kBytes, shape.hidden));
  {
    at::NoGradGuard no_grad;
    embedding_->weight.normal_(0, kWeightStd);
  }
  blocks_ = register_module("blocks", torch::nn::ModuleList());
  for (std::int64_t i = 0; i < shape.layers; ++i) {
    blocks_->push_back(Block(shape, shape.attention_apart ? "blocks." + std::to_string(i) + ".attention" : ""));
  }
  norm_ = register_module("norm", RmsNorm(shape.hidden));
  head_ = register_module("head", Projection(shape.hidden, kBytes, kWeightStd));
  rope_ = register_buffer("rope", rope_cache(shape.seq, shape.head_dim()));
}

at::Tensor ByteModelImpl::forward(const at::Tensor& bytes) { return forward_part(bytes, 0, 1); }

at::Tensor ByteModelImpl::loss(const at::Tensor& windows) {
  return loss_of(forward(windows.narrow(1, 0, windows.size(1) - 1)), windows);
}

at::Tensor ByteModelImpl::loss_of(const at::Tensor& logits, const at::Tensor& windows) {
  return at::cross_entropy_loss(logits.reshape({-1, kBytes}).to(at::kFloat),
                                windows.narrow(1, 1, windows.size(1) - 1).reshape(-1));
}

at::Tensor ByteModelImpl::forward_part(const at::Tensor& input, std::int64_t part, std::int64_t parts) {
  constexpr std::int64_t kStart = 0;
  at::Tensor h = part == 0 ? embedding_->forward(input) : input;
  const auto [first, end] = blocks_of(part, parts);
  for (std::size_t i = first; i < end; ++i) {
    h = ss::call(blocks_[i]->as<Block>(), h, ss::stays(&rope_), kStart);
  }
  return part + 1 == parts ? head_->forward(norm_->forward(h)) : h;
}

void ByteModelImpl::place_part(std::int64_t part, std::int64_t parts, c10::Device device) {
  if (part == 0) {
    embedding_->to(device);
  }
  const auto [first, end] = blocks_of(part, parts);
  for (std::size_t i = first; i < end; ++i) {
    blocks_[i]->to(device);
  }
  if (part + 1 == parts) {
    norm_->to(device);
    head_->to(device);
  }
  rope_.set_data(rope_.to(device));
}

std::pair<std::size_t, std::size_t> ByteModelImpl::blocks_of(std::int64_t part, std::int64_t parts) const {
  const auto blocks = static_cast<std::int64_t>(blocks_->size());
  return {static_cast<std::size_t>(blocks * part / parts), static_cast<std::size_t>(blocks * (part + 1) / parts)};
}

}  // namespace byte_model
