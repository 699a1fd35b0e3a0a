#include "models/block_model.h"

#include <cmath>

#include <ATen/Functions.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "sidestream/call.h"
#include "sidestream/scope.h"

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

at::Tensor BlockModel::loss_of(std::int64_t s, std::int64_t start) {
  const Batch batch = batch_of(shape_, s, head_.device());
  return loss(batch.tokens, batch.targets, start);
}

Batch batch_of(const BlockModel::Shape& shape, std::int64_t step, c10::Device device) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(1000 + step));
  const auto options = at::TensorOptions().dtype(at::kLong);
  Batch batch;
  batch.tokens = at::randint(64, {shape.batch, shape.sequence}, generator, options).to(device);
  batch.targets = at::randint(64, {shape.batch, shape.sequence}, generator, options).to(device);
  return batch;
}

BlockTraining::BlockTraining(const BlockModel::Shape& shape, c10::Device device, std::int64_t count,
                             const std::function<std::unique_ptr<OffloadEngine>(BlockModel&)>& make) {
  BlockModel model(shape);
  model.to(device);
  const auto engine = make ? make(model) : nullptr;
  torch::manual_seed(5);
  for (std::int64_t s = 0; s < count; ++s) {
    const Batch batch = batch_of(shape, s, device);
    at::Tensor value;
    steps.push_back(train_step(model, engine.get(), [&] {
      const at::Tensor loss = model.loss(batch.tokens, batch.targets);
      loss.backward();
      value = loss.detach();
    }));
    steps.back().emplace_back("loss", value);
  }
  if (engine != nullptr) {
    report = engine->report();
  }
}

void expect_plain(const BlockTraining& mine, const BlockTraining& plain) {
  ASSERT_EQ(mine.steps.size(), plain.steps.size());
  for (std::size_t s = 0; s < plain.steps.size(); ++s) {
    EXPECT_TRUE(same(mine.steps[s], plain.steps[s])) << "step " << s;
  }
}

}  // namespace sidestream::testing_model
