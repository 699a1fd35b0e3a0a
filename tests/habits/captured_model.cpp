#include "habits/captured_model.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DefaultDtype.h>

namespace sidestream::habits {
namespace {

/// What is no part of a block's module, as a mask or a counter in a member, is not to be captured for several shapes.
Block::Part captured_part(const Setup& setup, std::size_t index) {
  const auto part = static_cast<Block::Part>(setup.parts[index % setup.parts.size()]);
  return part == Block::Part::dropout || part == Block::Part::batch_norm || part == Block::Part::in_place
             ? part
             : Block::Part::plain;
}

}  // namespace

CountedBlock::CountedBlock(Block::Part part, c10::Device device)
    : block_(register_module("block", std::make_shared<Block>(part, device))) {}

at::Tensor CountedBlock::forward(const at::Tensor& h) {
  ++runs;
  return std::get<0>(block_->forward(h, h.detach(), 1.0));
}

CapturedModel::CapturedModel(const Setup& setup, c10::Device device) {
  for (std::size_t i = 0; i < 2; ++i) {
    blocks.push_back(
        register_module(std::to_string(i), std::make_shared<CountedBlock>(captured_part(setup, i), device)));
  }
}

at::Tensor CapturedModel::forward(at::Tensor h) {
  for (const auto& block : blocks) {
    h = block->forward(h);
  }
  return h;
}

std::int64_t CapturedModel::runs() const {
  std::int64_t sum = 0;
  for (const auto& block : blocks) {
    sum += block->runs;
  }
  return sum;
}

Switches Switches::now() {
  return {at::globalContext().deterministicAlgorithms(),
          c10::get_default_dtype() == caffe2::TypeMeta::fromScalarType(at::kDouble)};
}

NamedTensors state_of(const torch::nn::Module& model) {
  NamedTensors all;
  for (const auto& item : model.named_parameters()) {
    all.emplace_back("gradient of " + item.key(), item.value().grad());
    all.emplace_back(item.key(), item.value().detach());
  }
  for (const auto& item : model.named_buffers()) {
    all.emplace_back("buffer " + item.key(), item.value());
  }
  return all;
}

void copy_state(torch::nn::Module& to, const torch::nn::Module& from) {
  const at::NoGradGuard no_grad;
  auto mine = to.parameters();
  auto theirs = from.parameters();
  for (std::size_t i = 0; i < mine.size(); ++i) {
    mine[i].detach().copy_(theirs[i].detach());
    mine[i].mutable_grad() = theirs[i].grad().defined() ? theirs[i].grad().clone() : at::Tensor();
  }
  mine = to.buffers();
  theirs = from.buffers();
  for (std::size_t i = 0; i < mine.size(); ++i) {
    mine[i].copy_(theirs[i]);
  }
}

void descend(torch::nn::Module& model) {
  const at::NoGradGuard no_grad;
  for (at::Tensor& parameter : model.parameters()) {
    if (parameter.grad().defined() && parameter.requires_grad()) {
      parameter.sub_(parameter.grad() * 0.05);
    }
  }
}

at::Tensor rows_of(std::int64_t number, std::int64_t rows, c10::Device device) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(7000 + number));
  return at::randn({rows, kWidth}, generator, at::TensorOptions().dtype(at::kFloat)).to(device);
}

}  // namespace sidestream::habits
