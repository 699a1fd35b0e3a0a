#pragma once
#include <cstdint>
#include <functional>
#include <stdexcept>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

namespace sidestream::testing_model {

/// A user's own exception.
class ModelBroke : public std::runtime_error {
 public:
  explicit ModelBroke(int number) : std::runtime_error("the model broke"), number_(number) {}
  [[nodiscard]] int number() const noexcept { return number_; }

 private:
  int number_;
};

/// A place in user code where something is done, once: the n-th time that it is reached.
class Trap {
 public:
  /// Places inside a call (of each layer), between calls, and in hooks.
  enum class Place : std::uint8_t {
    call_begins,
    in_scope,
    in_nested_scope,
    custom_forward,
    custom_backward,
    tensor_hook,
    node_hook,
    call_ends,
    between_calls,
    between_calls_backward,
    parameter_hook,
    post_accumulate_hook,
    pre_warmup_hook,
    post_warmup_hook,
    progress
  };

  /// `act` is done at the n-th visit (from 0) of `place` from here on.
  void arm(Place place, std::int64_t n, std::function<void()> act);
  void disarm() { left_ = -1; }
  [[nodiscard]] bool sprung() const noexcept { return sprung_; }
  /// `saved` is a tensor that backward will read.
  void visit(Place place, const at::Tensor& saved = {});
  /// The tensor of the visit that is going on.
  [[nodiscard]] at::Tensor saved() const { return saved_; }

 private:
  Place place_ = Place::call_begins;
  std::int64_t left_ = -1;
  std::function<void()> act_;
  bool sprung_ = false;
  at::Tensor saved_;
};

[[nodiscard]] const char* name_of(Trap::Place place);

/// A layer with two scopes, a custom autograd function and hooks, all of which visit the trap.
class TrappedLayer : public torch::nn::Module {
 public:
  TrappedLayer(std::int64_t hidden, Trap& trap);
  at::Tensor forward(at::Tensor h);

 private:
  Trap& trap_;
  at::Tensor fc1_, fc2_;
};

/// Layers called by ss::call, with plain work before, between and behind them.
class TrappedModel : public torch::nn::Module {
 public:
  TrappedModel(std::int64_t layers, Trap& trap);
  at::Tensor loss(const at::Tensor& x);
  /// Registers the hooks of Trap::Place::parameter_hook and post_accumulate_hook on each parameter.
  void hook_parameters();

  torch::nn::ModuleList layers;

 private:
  Trap& trap_;
  at::Tensor first_;
};

/// Input of step `s`.
[[nodiscard]] at::Tensor trapped_input(std::int64_t s, c10::Device device);

}  // namespace sidestream::testing_model
