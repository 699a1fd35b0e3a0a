#include "models/body_model.h"

#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <torch/utils.h>

#include "sidestream/call.h"

namespace sidestream::testing_model {
namespace {

at::Tensor drawn(std::uint64_t seed, at::IntArrayRef sizes, double scale) {
  auto generator = at::detail::createCPUGenerator(seed);
  return at::randn(sizes, generator, at::TensorOptions()) * scale;
}

}  // namespace

BodyBlock::BodyBlock(std::int64_t hidden, Body given) : body(std::move(given)) {
  weight = register_parameter("weight", drawn(7, {hidden, hidden}, 0.3));
}

BodyModel::BodyModel(c10::Device device, const std::vector<BodyBlock::Body>& bodies, std::int64_t hidden)
    : hidden_(hidden), device_(device) {
  first = register_parameter("first", drawn(5, {hidden, hidden}, 0.3));
  last = register_parameter("last", drawn(6, {hidden, hidden}, 0.3));
  for (const BodyBlock::Body& body : bodies) {
    blocks->push_back(std::make_shared<BodyBlock>(hidden, body));
  }
  register_module("blocks", blocks);
  to(device);
}

at::Tensor BodyModel::forward(const at::Tensor& x) {
  at::Tensor h = at::matmul(x, first);
  for (auto& block : *blocks) {
    h = call(block->as<BodyBlock>(), h);
  }
  return at::matmul(h, last);
}

at::Tensor BodyModel::data(std::int64_t s, std::int64_t length, std::int64_t batch, std::int64_t salt) const {
  return drawn(static_cast<std::uint64_t>(100 + 10 * s + salt), {batch, length, hidden_}, 1.0).to(device_);
}

StepTensors BodyModel::step(OffloadEngine* engine, std::int64_t s, std::int64_t length, std::int64_t batch) {
  torch::manual_seed(s + 1);
  at::Tensor loss;
  StepTensors result = train_step(*this, engine, [&] {
    loss = (forward(data(s, length, batch)) * data(s, length, batch, 1)).sum();
    loss.backward();
  });
  for (auto& block : *blocks) {
    result.emplace_back("kept", block->as<BodyBlock>()->kept);
  }
  result.emplace_back("loss", loss);
  return result;
}

void BodyTwins::expect_plain(OffloadEngine& engine, std::int64_t first, std::int64_t last, std::int64_t length,
                             std::int64_t batch) {
  testing_model::expect_plain(
      first, last, [&](std::int64_t s) { return mine.step(&engine, s, length, batch); },
      [&](std::int64_t s) { return plain.step(nullptr, s, length, batch); });
}

}  // namespace sidestream::testing_model
