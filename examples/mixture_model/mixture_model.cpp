#include "mixture_model.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <sidestream/call.h>
#include <sidestream/scope.h>

namespace ss = sidestream;

namespace mixture_model {
namespace {

constexpr std::int64_t kBytes = 256;
constexpr double kWeightStd = 0.02;
constexpr double kNormEpsilon = 1e-6;
constexpr double kRopeBase = 10000;

at::Tensor drawn(at::IntArrayRef sizes, double std) { return at::empty(sizes).normal_(0, std); }

/// Two branches a layer add to the residual stream; scaled so that its variance does not grow with depth.
double branch_std(const MixtureShape& shape) { return kWeightStd / std::sqrt(2.0 * static_cast<double>(shape.layers)); }

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

at::Tensor norm(const at::Tensor& x, const at::Tensor& weight) {
  return at::rms_norm(x, weight.sizes(), weight, kNormEpsilon);
}

at::Tensor swiglu(const at::Tensor& x) {
  const std::vector<at::Tensor> half = x.chunk(2, -1);
  return at::silu(half[0]) * half[1];
}

/// [assignments, experts], true where the assignment is to the expert. `chosen`: [tokens, top_k].
at::Tensor assignments(const at::Tensor& chosen, std::int64_t experts) {
  return chosen.reshape({-1, 1}).eq(at::arange(experts, chosen.options()));
}

/// Each token once for each of its experts: [tokens * top_k, hidden].
at::Tensor repeated(const at::Tensor& tokens, std::int64_t times) {
  return tokens.unsqueeze(1).expand({-1, times, -1}).reshape({-1, tokens.size(1)});
}

/// The sum over each token's experts of what they give, [tokens * top_k, hidden], by weight.
at::Tensor weighted_sum(const at::Tensor& given, const at::Tensor& weights) {
  return (given.view({weights.size(0), weights.size(1), -1}) * weights.unsqueeze(-1)).sum(1);
}

}  // namespace

FrontImpl::FrontImpl(const MixtureShape& shape) : shape_(shape) {
  const std::int64_t kv_width = shape.kv_heads * shape.head_dim();
  norm1_ = register_parameter("norm1", at::ones({shape.hidden}));
  qkv_ = register_parameter("qkv", drawn({shape.hidden + 2 * kv_width, shape.hidden}, kWeightStd));
  proj_ = register_parameter("proj", drawn({shape.hidden, shape.hidden}, branch_std(shape)));
  norm2_ = register_parameter("norm2", at::ones({shape.hidden}));
  router_ = register_parameter("router", drawn({shape.experts, shape.hidden}, kWeightStd));
}

at::Tensor FrontImpl::attention(const at::Tensor& input, const at::Tensor& rope) {
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
        at::linear(input, qkv_).split_with_sizes({shape_.hidden, kv_width, kv_width}, -1);
    const at::Tensor angles = rope.narrow(0, 0, seq).unsqueeze(1);
    const at::Tensor cosine = angles.narrow(-1, 0, dim / 2);
    const at::Tensor sine = angles.narrow(-1, dim / 2, dim / 2);
    q = rotate(parts[0].view({batch, seq, shape_.heads, dim}), cosine, sine);
    k = rotate(parts[1].view({batch, seq, shape_.kv_heads, dim}), cosine, sine);
    v = parts[2].view({batch, seq, shape_.kv_heads, dim});
  }
  ss::OffloadScope scope("core_attn");
  const bool grouped = shape_.kv_heads != shape_.heads;
  return at::scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), /*attn_mask=*/{},
                                          /*dropout_p=*/0.0,
                                          /*is_causal=*/true, /*scale=*/std::nullopt, grouped)
      .transpose(1, 2)
      .reshape({batch, seq, shape_.hidden});
}

std::vector<at::Tensor> FrontImpl::forward(const at::Tensor& input, const at::Tensor* rope) {
  at::Tensor h;
  {
    ss::OffloadScope scope("norm1");
    h = norm(input, norm1_);
  }
  h = attention(h, *rope);
  {
    ss::OffloadScope scope("proj");
    h = at::linear(h, proj_);
  }
  const at::Tensor residual = (input + h).reshape({-1, shape_.hidden});
  {
    ss::OffloadScope scope("norm2");
    h = norm(residual, norm2_);
  }
  ss::OffloadScope scope("router");
  const at::Tensor shares = at::linear(h, router_).to(at::kFloat).softmax(-1);
  const auto [best, chosen] = shares.topk(shape_.top_k, -1);
  const at::Tensor weights = (best / best.sum(-1, /*keepdim=*/true)).to(h.scalar_type());
  // How often each expert is chosen, by how much it is wanted: least where all are wanted alike.
  const at::Tensor chosen_share = assignments(chosen, shape_.experts).to(at::kFloat).mean(0);
  const at::Tensor balance = (chosen_share * shares.mean(0)).sum() * static_cast<double>(shape_.experts);
  return {residual, h, weights, chosen, balance};
}

ExpertsImpl::ExpertsImpl(const MixtureShape& shape) : shape_(shape) {
  up_ = register_parameter("up", drawn({shape.experts, 2 * shape.ffn, shape.hidden}, kWeightStd));
  down_ = register_parameter("down", drawn({shape.experts, shape.hidden, shape.ffn}, branch_std(shape)));
}

at::Tensor ExpertsImpl::forward(const at::Tensor& tokens, const at::Tensor& weights, const at::Tensor& chosen) {
  return shape_.capacity > 0 ? up_to_capacity(tokens, weights, chosen) : as_many_as_come(tokens, weights, chosen);
}

at::Tensor ExpertsImpl::as_many_as_come(const at::Tensor& tokens, const at::Tensor& weights, const at::Tensor& chosen) {
  std::vector<std::int64_t> counts;
  std::vector<at::Tensor> parts;
  at::Tensor place_of_assignment;
  {
    ss::OffloadScope scope("permute");
    const at::Tensor counted = assignments(chosen, shape_.experts).sum(0).cpu();  // the host waits for the device
    counts.assign(counted.const_data_ptr<std::int64_t>(), counted.const_data_ptr<std::int64_t>() + counted.numel());
    const at::Tensor by_expert = chosen.reshape({-1}).argsort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
    place_of_assignment = by_expert.argsort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
    parts = repeated(tokens, shape_.top_k).index_select(0, by_expert).split_with_sizes(counts);
  }
  const std::vector<at::Tensor> up = up_.unbind(0);
  const std::vector<at::Tensor> down = down_.unbind(0);
  const auto in_each = [&](const char* name, const auto& compute) {
    ss::OffloadScope scope(name);
    for (std::size_t expert = 0; expert < parts.size(); ++expert) {
      if (counts[expert] > 0) {
        parts[expert] = compute(parts[expert], expert);
      }
    }
  };
  in_each("fc1", [&](const at::Tensor& part, std::size_t expert) { return at::linear(part, up[expert]); });
  in_each("act", [&](const at::Tensor& part, std::size_t) { return swiglu(part); });
  in_each("fc2", [&](const at::Tensor& part, std::size_t expert) { return at::linear(part, down[expert]); });
  ss::OffloadScope scope("combine");
  return weighted_sum(at::cat(parts).index_select(0, place_of_assignment), weights);
}

at::Tensor ExpertsImpl::up_to_capacity(const at::Tensor& tokens, const at::Tensor& weights, const at::Tensor& chosen) {
  const std::int64_t count = chosen.numel();
  const double even = static_cast<double>(count) / static_cast<double>(shape_.experts);
  const std::int64_t room = std::clamp<std::int64_t>(std::llround(std::ceil(even * shape_.capacity)), 1, count);
  const std::int64_t rows = shape_.experts * room;
  at::Tensor row;
  at::Tensor h;
  {
    ss::OffloadScope scope("permute");
    // Each assignment's number among those to its expert; those beyond the capacity share one row that no expert uses.
    const at::Tensor mine = assignments(chosen, shape_.experts).to(at::kLong);
    const at::Tensor flat = chosen.reshape({-1});
    const at::Tensor number = (mine.cumsum(0) * mine).sum(1) - 1;
    row = (flat * room + number).masked_fill(number.ge(room), rows);
    h = at::zeros({rows + 1, shape_.hidden}, tokens.options())
            .index_copy(0, row, repeated(tokens, shape_.top_k))
            .narrow(0, 0, rows)
            .view({shape_.experts, room, shape_.hidden});
  }
  {
    ss::OffloadScope scope("fc1");
    h = at::bmm(h, up_.transpose(1, 2));
  }
  {
    ss::OffloadScope scope("act");
    h = swiglu(h);
  }
  {
    ss::OffloadScope scope("fc2");
    h = at::bmm(h, down_.transpose(1, 2)).view({rows, shape_.hidden});
  }
  ss::OffloadScope scope("combine");
  const at::Tensor nothing = at::zeros({1, shape_.hidden}, h.options());
  return weighted_sum(at::cat({h, nothing}).index_select(0, row), weights);
}

MixtureBlockImpl::MixtureBlockImpl(const MixtureShape& shape) {
  front_ = register_module("front", Front(shape));
  experts_ = register_module("experts", Experts(shape));
}

std::vector<at::Tensor> MixtureBlockImpl::forward(const at::Tensor& input, const at::Tensor* rope) {
  const std::vector<at::Tensor> routed = ss::call(front_, input, ss::stays(rope));
  const at::Tensor given = ss::call(experts_, routed[1], routed[2], routed[3]);
  return {(routed[0] + given).view(input.sizes()), routed[4]};
}

MixtureModelImpl::MixtureModelImpl(const MixtureShape& shape) : shape_(shape) {
  embedding_ = register_module("embedding", torch::nn::Embedding(kBytes, shape.hidden));
  {
    at::NoGradGuard no_grad;
    embedding_->weight.normal_(0, kWeightStd);
  }
  blocks_ = register_module("blocks", torch::nn::ModuleList());
  for (std::int64_t i = 0; i < shape.layers; ++i) {
    blocks_->push_back(MixtureBlock(shape));
  }
  norm_ = register_parameter("norm", at::ones({shape.hidden}));
  head_ = register_parameter("head", drawn({kBytes, shape.hidden}, kWeightStd));
  rope_ = register_buffer("rope", rope_cache(shape.seq, shape.head_dim()));
}

std::vector<at::Tensor> MixtureModelImpl::forward(const at::Tensor& bytes) {
  at::Tensor h = embedding_->forward(bytes);
  at::Tensor balance;
  for (const auto& block : *blocks_) {
    const std::vector<at::Tensor> out = ss::call(block->as<MixtureBlock>(), h, ss::stays(&rope_));
    h = out[0];
    balance = balance.defined() ? balance + out[1] : out[1];
  }
  return {at::linear(norm(h, norm_), head_), balance};
}

namespace {

at::Tensor next_byte_loss(const at::Tensor& logits, const at::Tensor& windows) {
  return at::cross_entropy_loss(logits.reshape({-1, kBytes}).to(at::kFloat),
                                windows.narrow(1, 1, windows.size(1) - 1).reshape(-1));
}

}  // namespace

at::Tensor MixtureModelImpl::cross_entropy(const at::Tensor& windows) {
  return next_byte_loss(forward(windows.narrow(1, 0, windows.size(1) - 1))[0], windows);
}

at::Tensor MixtureModelImpl::loss(const at::Tensor& windows) {
  const std::vector<at::Tensor> out = forward(windows.narrow(1, 0, windows.size(1) - 1));
  return next_byte_loss(out[0], windows) + out[1] * shape_.balance_weight;
}

}  // namespace mixture_model
