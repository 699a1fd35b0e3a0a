// What a trainer changes between steps, and all that must be equal on both sides.
#include <algorithm>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "habits/trainer.h"

namespace sidestream::habits {

void Trainer::change(const Action& action) {
  const at::NoGradGuard no_grad;
  const auto index = static_cast<std::size_t>(action.a) % model_->blocks.size();
  switch (action.kind) {
    case Kind::freeze: {
      std::vector<at::Tensor> chosen = model_->blocks[index]->parameters();
      if (action.b == 1) {
        chosen = {chosen[1]};
      } else if (action.b == 2) {
        chosen = {model_->stem};
      }
      for (at::Tensor& parameter : chosen) {
        parameter.requires_grad_(false);
      }
      break;
    }
    case Kind::thaw:
      for (at::Tensor& parameter : model_->parameters()) {
        parameter.requires_grad_(true);
      }
      break;
    case Kind::load:
      for (auto& item : model_->named_parameters()) {
        if (action.a == 0) {
          item.value().mul_(0.9);
        } else {
          item.value().copy_(item.value().clone() + 0.01);
        }
      }
      break;
    case Kind::relocate:
      for (at::Tensor& parameter : model_->blocks[index]->parameters()) {
        parameter.set_data(parameter.detach() * 0.95);
      }
      break;
    case Kind::convert:
      known_.clear();  // the captures are of other weights than the model has from here on
      if (action.b == 0) {
        model_->to(action.a == 2 ? at::Device(at::kCPU) : device_);
        if (action.a != 2) {
          model_->to(at::kDouble);
        }
      } else {
        model_->to(device_);
        model_->to(at::kFloat);
      }
      break;
    case Kind::replace_module:
      known_.clear();
      model_->replace(index);
      break;
    case Kind::part_in_eval:
      part_in_eval_ = action.a - 1;
      set_flags(true);
      break;
    case Kind::add_hook: {
      const at::AutoGradMode with_grad(true);
      at::Tensor parameter = model_->blocks[index]->parameters()[1];
      if (!parameter.requires_grad()) {
        break;
      }
      const double factor = action.b == 0 ? 2.0 : 0.5;
      hooks_.push_back(
          {parameter, parameter.register_hook([factor](const at::Tensor& grad) { return grad * factor; })});
      break;
    }
    case Kind::remove_hook:
      if (!hooks_.empty()) {
        hooks_.back().parameter.remove_hook(hooks_.back().handle);
        hooks_.pop_back();
      }
      break;
    case Kind::reset:
      known_.clear();
      sized_ = false;
      if (engine_ != nullptr) {
        engine_->reset();
      }
      break;
    case Kind::switch_offload: {
      const bool all = !sized_ || action.a == 2;  // before a first step, no block has a name yet
      known_.clear();
      sized_ = false;
      if (engine_ != nullptr && all) {
        engine_->set_activation_offloading("all", action.b == 1);
      } else if (engine_ != nullptr) {
        engine_->set_activation_offloading(*model_->blocks[index], action.b == 1);
      }
      break;
    }
    case Kind::new_engine:
      make_engine();
      break;
    case Kind::dropout_rate:
      model_->set_dropout(action.a == 0 ? 0.25 : action.a == 1 ? 0.0 : 0.6);
      break;
    case Kind::weights:
      weight_time_ = static_cast<WeightTime>(std::min(action.a, kWeightTimes - 1));
      break;
    case Kind::report:
      if (engine_ != nullptr) {
        (void)engine_->report();
      }
      break;
    default:
      break;
  }
}

std::vector<std::pair<std::string, at::Tensor>> Trainer::state() const {
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (const auto& item : model_->named_parameters()) {
    all.emplace_back("gradient of " + item.key(), item.value().grad());
  }
  for (const auto& item : model_->named_parameters()) {
    all.emplace_back(item.key(), item.value().detach());
  }
  for (const auto& item : model_->named_buffers()) {
    all.emplace_back("buffer " + item.key(), item.value());
  }
  for (const auto& block : model_->blocks) {
    for (const at::Tensor& tensor : block->unregistered()) {
      all.emplace_back("unregistered tensor", tensor);
    }
  }
  const auto list = [&](const char* name, const std::vector<at::Tensor>& tensors) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      all.emplace_back(name + std::to_string(i), tensors[i]);
    }
  };
  list("loss ", losses_);
  list("kept output ", kept_);
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    all.emplace_back("gradient of input " + std::to_string(i), inputs_[i].grad());
  }
  all.emplace_back("the generator's state", random);
  for (const CapturedTrainer* captured : {buckets_.get(), whole_steps_.get()}) {
    if (captured != nullptr) {
      for (auto& item : captured->state()) {
        all.emplace_back((captured == buckets_.get() ? "buckets: " : "whole steps: ") + item.first,
                         std::move(item.second));
      }
    }
  }
  if (second_ != nullptr) {
    for (auto& item : second_->state()) {
      if (item.first != "the generator's state") {
        all.emplace_back("second model: " + item.first, std::move(item.second));
      }
    }
  }
  return all;
}

void Trainer::forget_inputs() {
  inputs_.clear();
  if (second_ != nullptr) {
    second_->forget_inputs();
  }
}

void Trainer::become(const Trainer& other) {
  const at::NoGradGuard no_grad;
  copy_state(*model_, *other.model_);
  for (std::size_t i = 0; i < model_->blocks.size(); ++i) {
    const auto from = other.model_->blocks[i]->unregistered();
    auto to = model_->blocks[i]->unregistered();
    for (std::size_t t = 0; t < to.size(); ++t) {
      to[t].copy_(from[t]);
    }
  }
  const auto clones = [](const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> result;
    for (const at::Tensor& tensor : tensors) {
      result.push_back(tensor.clone());
    }
    return result;
  };
  kept_ = clones(other.kept_);
  losses_ = clones(other.losses_);
  inputs_.clear();
  weight_time_ = other.weight_time_;
  random = other.random.defined() ? other.random.clone() : at::Tensor();
  if (other.second_ != nullptr) {
    second().become(*other.second_);
  }
  if (buckets_ != nullptr && other.buckets_ != nullptr) {
    buckets_->become(*other.buckets_);
  }
  if (whole_steps_ != nullptr && other.whole_steps_ != nullptr) {
    whole_steps_->become(*other.whole_steps_);
  }
}

}  // namespace sidestream::habits
