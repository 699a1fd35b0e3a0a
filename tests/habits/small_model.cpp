#include "habits/small_model.h"

#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "sidestream/scope.h"

namespace sidestream::habits {
namespace {

at::Tensor weight(std::int64_t out, std::int64_t in, c10::Device device) {
  return at::randn({out, in}, at::TensorOptions().dtype(at::kFloat).device(device)) * 0.25;
}

class Container : public torch::nn::Module {};

}  // namespace

Block::Block(Part part, c10::Device device) : part_(part) {
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  norm_ = register_parameter("norm", at::ones({kWidth}, options));
  fc1_ = register_parameter("fc1", weight(2 * kWidth, kWidth, device));
  fc2_ = register_parameter("fc2", weight(kWidth, 2 * kWidth, device));
  if (part_ == Part::batch_norm) {
    mean_ = register_buffer("mean", at::zeros({2 * kWidth}, options));
    variance_ = register_buffer("variance", at::ones({2 * kWidth}, options));
    scale_ = register_parameter("scale", at::ones({2 * kWidth}, options));
    shift_ = register_parameter("shift", at::zeros({2 * kWidth}, options));
  }
  if (part_ == Part::dropout) {
    drop = register_module("drop", torch::nn::Dropout(0.25));
  }
  if (part_ == Part::counter) {
    count_ = at::zeros({1}, options);
  }
}

std::vector<at::Tensor> Block::unregistered() const {
  return count_.defined() ? std::vector<at::Tensor>{count_} : std::vector<at::Tensor>{};
}

at::Tensor Block::attend(const at::Tensor& x) {
  const std::int64_t rows = x.size(0);
  if (!mask_.defined() || mask_.size(0) != rows) {
    const at::NoGradGuard no_grad;
    mask_ = at::full({rows, rows}, -1e4, at::TensorOptions().dtype(at::kFloat).device(x.device())).triu(1);
  }
  const at::Tensor scores = at::matmul(x, x.t()) * 0.1 + mask_.to(x.dtype());
  return at::matmul(scores.softmax(1), x);
}

std::tuple<at::Tensor, at::Tensor> Block::forward(at::Tensor given, at::Tensor context, double scale) {
  ++runs;
  if (throws) {
    throws = false;
    thrown = true;
    throw Left();
  }
  // Entered through views: what is summed inside of the call is then summed in one order, graphed or not.
  const at::Tensor h = given.view_as(given);
  context = context.view_as(context);
  at::Tensor x;
  {
    const OffloadScope scope("norm");
    x = at::rms_norm(h, {kWidth}, norm_, 1e-5);
  }
  {
    const OffloadScope scope("fc1");
    x = at::linear(x, fc1_);
    if (part_ == Part::batch_norm) {
      x = at::batch_norm(x, scale_, shift_, mean_, variance_, is_training(), 0.1, 1e-5, /*cudnn_enabled=*/false);
    } else if (part_ == Part::cached_mask) {
      x = attend(x);
    } else if (part_ == Part::counter) {
      const at::NoGradGuard no_grad;
      count_.add_(1);
    } else if (part_ == Part::default_dtype) {
      x = x + at::linspace(0, 1, x.size(0), at::TensorOptions().device(x.device())).sin().unsqueeze(1).to(x.dtype());
    }
  }
  {
    const OffloadScope scope("act");
    x = at::gelu(x);
    if (part_ == Part::counter) {
      x = x * (count_ * 0.01).to(x.dtype());
    } else if (part_ == Part::in_place) {
      x = x * 1.5;
      x.tanh_();
    }
  }
  {
    const OffloadScope scope("fc2");
    x = at::linear(x, fc2_);
    if (part_ == Part::dropout) {
      x = drop(x);
    }
  }
  at::Tensor out = h + x * scale + context * 0.1;
  at::Tensor aux = x.tanh();  // not of `out`: a hook there would see what comes from outside of the call only
  return {out, aux};
}

void Block::read(const ReadAs& as) {
  for (auto& [name, member] : std::initializer_list<std::pair<const char*, at::Tensor*>>{
           {"norm", &norm_}, {"fc1", &fc1_}, {"fc2", &fc2_}, {"scale", &scale_}, {"shift", &shift_}}) {
    if (const at::Tensor* parameter = parameters_.find(name)) {
      *member = as ? as(name, *parameter) : *parameter;
    }
  }
}

std::tuple<at::Tensor, at::Tensor> Block::forward(at::Tensor given, const Beside* beside) {
  return forward(std::move(given), beside->context, beside->scale);
}

SmallModel::SmallModel(const Setup& setup, c10::Device device) : setup_(setup), device_(device) {
  stem = register_parameter("stem", weight(kWidth, kWidth, device));
  head = register_parameter("head", weight(kWidth, kWidth, device));
  container_ = register_module("blocks", std::make_shared<Container>());
  for (const std::int64_t part : setup.parts) {
    blocks.push_back(container_->register_module(std::to_string(blocks.size()),
                                                 std::make_shared<Block>(static_cast<Block::Part>(part), device)));
  }
  late = container_->register_module("late", std::make_shared<Block>(Block::Part::plain, device));
}

void SmallModel::replace(std::size_t index) {
  const bool training = blocks[index]->is_training();
  blocks[index] = container_->replace_module(
      std::to_string(index), std::make_shared<Block>(static_cast<Block::Part>(setup_.parts[index]), device_));
  blocks[index]->train(training);
  set_dropout(dropout_);
}

void SmallModel::set_dropout(double rate) {
  dropout_ = rate;
  for (const auto& block : blocks) {
    if (block->drop) {
      block->drop->options.p(rate);
    }
  }
}

}  // namespace sidestream::habits
