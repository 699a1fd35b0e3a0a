#include "unit/graphs/block_model.h"

#include <cmath>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/types.h>
#include <torch/utils.h>

namespace sidestream::testing_model {
namespace {

at::Tensor weight(std::vector<std::int64_t> sizes) {
  return at::randn(sizes) / std::sqrt(static_cast<double>(sizes.back()));
}

}  // namespace

Block::Block(std::int64_t hidden, std::int64_t heads, double dropout)
    : hidden_(hidden), heads_(heads), dropout_(dropout) {
  norm1_ = register_parameter("norm1", at::ones({hidden}));
  norm2_ = register_parameter("norm2", at::ones({hidden}));
  qkv_ = register_parameter("qkv", weight({3 * hidden, hidden}));
  proj_ = register_parameter("proj", weight({hidden, hidden}));
  fc1_ = register_parameter("fc1", weight({4 * hidden, hidden}));
  fc2_ = register_parameter("fc2", weight({hidden, 4 * hidden}));
}

at::Tensor Block::forward(at::Tensor h, const at::Tensor* positions, std::int64_t start) {
  const std::int64_t batch = h.size(0);
  const std::int64_t length = h.size(1);
  at::Tensor x;
  at::Tensor y;
  {
    const OffloadScope scope("norm1");
    x = at::rms_norm(h + positions->slice(0, start, start + length), {hidden_}, norm1_, 1e-5);
  }
  {
    const OffloadScope scope("qkv");
    x = at::linear(x, qkv_);
  }
  {
    const OffloadScope scope("core_attn");
    const auto split = x.view({batch, length, 3, heads_, hidden_ / heads_}).permute({2, 0, 3, 1, 4});
    y = at::scaled_dot_product_attention(split[0], split[1], split[2], {}, 0.0, /*is_causal=*/true);
    y = y.transpose(1, 2).reshape({batch, length, hidden_});
  }
  {
    const OffloadScope scope("proj");
    h = h + at::dropout(at::linear(y, proj_), dropout_, is_training());
  }
  {
    const OffloadScope scope("norm2");
    x = at::rms_norm(h, {hidden_}, norm2_, 1e-5);
  }
  {
    const OffloadScope scope("fc1");
    x = at::linear(x, fc1_);
  }
  {
    const OffloadScope scope("act");
    x = at::gelu(x);
  }
  const OffloadScope scope("fc2");
  return h + at::linear(x, fc2_);
}

BlockModel::BlockModel(const Shape& shape) : shape_(shape) {
  torch::manual_seed(11);
  embedding_ = register_parameter("embedding", weight({64, shape.hidden}));
  positions_ = register_buffer("positions", weight({2 * shape.sequence, shape.hidden}));
  head_ = register_parameter("head", weight({64, shape.hidden}));
  for (std::int64_t i = 0; i < shape.layers; ++i) {
    blocks->push_back(std::make_shared<Block>(shape.hidden, shape.heads, shape.dropout));
  }
  register_module("blocks", blocks);
}

at::Tensor BlockModel::loss(const at::Tensor& tokens, const at::Tensor& targets, std::int64_t start) {
  positions_ = named_buffers()["positions"];
  at::Tensor h = at::embedding(embedding_, tokens);
  for (auto& block : *blocks) {
    h = call(block->as<Block>(), h, stays(&positions_), start);
  }
  return at::cross_entropy_loss(at::linear(h, head_).view({-1, 64}), targets.view({-1}));
}

Batch batch_of(const BlockModel::Shape& shape, std::int64_t step, c10::Device device) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(1000 + step));
  const auto options = at::TensorOptions().dtype(at::kLong);
  Batch batch;
  batch.tokens = at::randint(64, {shape.batch, shape.sequence}, generator, options).to(device);
  batch.targets = at::randint(64, {shape.batch, shape.sequence}, generator, options).to(device);
  return batch;
}

std::vector<at::Tensor> gradients(const torch::nn::Module& model) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& parameter : model.parameters()) {
    result.push_back(parameter.grad().defined()
                         ? parameter.grad().detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true)
                         : at::empty({0}));
  }
  return result;
}

void clear_gradients(torch::nn::Module& model) { model.zero_grad(/*set_to_none=*/true); }

void descend(torch::nn::Module& model) {
  const at::NoGradGuard no_grad;
  for (at::Tensor& parameter : model.parameters()) {
    if (parameter.grad().defined()) {
      parameter.add_(parameter.grad(), -0.1);
    }
  }
}

bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) {
    return false;
  }
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!at::equal(a[i], b[i])) {
      return false;
    }
  }
  return true;
}

}  // namespace sidestream::testing_model
