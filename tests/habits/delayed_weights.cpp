// Delayed weight gradients. A plain twin computes them in the backward, and accumulates them when the engine does: a sum of more than two
// gradients depends on the order.
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include "habits/trainer.h"
#include "offload/name_pattern.h"

namespace sidestream::habits {

Block::ReadAs Trainer::delayed_reads(std::size_t index) {
  const std::size_t call = next_call_++;
  if (call >= delayed_calls_.size() || !delayed_calls_[call]) {
    return {};
  }
  const std::string block = index < model_->blocks.size() ? std::to_string(index) : "late";
  return [this, block](const std::string& name, const at::Tensor& parameter) {
    if (!parameter.requires_grad() || !NamePatterns::parse(form().delayed).matches("blocks." + block + "." + name)) {
      return parameter;
    }
    at::Tensor leaf = parameter.detach().requires_grad_(true);
    leaf.register_hook([this, parameter, chunk = chunk_](const at::Tensor& gradient) {
      delayed_.push_back({parameter, gradient.detach().clone(), chunk});
    });
    return leaf;
  };
}

void Trainer::follow(const Trainer& mine) {
  delayed_calls_ = mine.delayed_calls_;
  if (second_ != nullptr && mine.second_ != nullptr) {
    second_->follow(*mine.second_);
  }
}

void Trainer::compute_weights(const std::optional<ChunkId>& chunk) {
  if (engine_ != nullptr) {
    if (chunk) {
      engine_->backward_dw(*chunk);
    } else {
      engine_->backward_dw();
    }
    return;
  }
  std::vector<DelayedGradient> others;
  for (DelayedGradient& each : std::exchange(delayed_, {})) {
    if (chunk && !(each.chunk && *each.chunk == *chunk)) {
      others.push_back(std::move(each));
    } else {
      torch::autograd::backward({each.parameter}, {each.gradient});
      seen_.add("delayed weight gradients");
    }
  }
  delayed_ = std::move(others);
}

void Trainer::compute_weights_after_backward(const std::optional<ChunkId>& chunk) {
  if (!delays()) {
    return;
  }
  if (weight_time_ == WeightTime::at_once) {
    compute_weights(chunk);
  } else if (weight_time_ == WeightTime::after_two && std::exchange(after_one_backward_, !after_one_backward_)) {
    compute_weights(std::nullopt);
  }
}

void Trainer::compute_weights_at_end() {
  if (delays() && weight_time_ != WeightTime::forgotten) {
    compute_weights(std::nullopt);
  }
}

}  // namespace sidestream::habits
