#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <ATen/Functions.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include "models/plain_twin.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"

namespace sidestream::testing_model {

/// A residual block of registered submodules: dropout and batch norm have training flags of their own.
class Part : public torch::nn::Module {
 public:
  explicit Part(std::int64_t width)
      : fc1(register_module("fc1", torch::nn::Linear(width, 2 * width))),
        norm(register_module("norm", torch::nn::BatchNorm1d(2 * width))),
        drop(register_module("drop", torch::nn::Dropout(0.5))),
        fc2(register_module("fc2", torch::nn::Linear(2 * width, width))),
        scale_(register_parameter("scale", at::ones({width}, at::kFloat))) {}
  at::Tensor forward(const at::Tensor& h) { return h + fc2(drop(at::gelu(norm(fc1(h))))) * scale_; }
  /// Registers another tensor under the same name.
  void renew_scale() {
    const at::Tensor fresh = (scale_.detach() * 0.5).clone();
    parameters_.erase("scale");
    scale_ = register_parameter("scale", fresh);
  }

  torch::nn::Linear fc1;
  torch::nn::BatchNorm1d norm;
  torch::nn::Dropout drop;
  torch::nn::Linear fc2;

 private:
  at::Tensor scale_;
};

/// One submodule, named "part".
template <class Part>
class OnePart : public torch::nn::Module {
 public:
  std::shared_ptr<Part> part = register_module("part", std::make_shared<Part>());
};

/// Parts called by ss::call, named "parts.N".
class PartModel : public torch::nn::Module {
 public:
  explicit PartModel(std::int64_t count = 3, std::int64_t width = 8) : width_(width) {
    torch::manual_seed(23);
    for (std::int64_t i = 0; i < count; ++i) {
      parts->push_back(std::make_shared<Part>(width));
    }
    register_module("parts", parts);
  }
  at::Tensor forward(at::Tensor h) {
    for (const auto& part : *parts) {
      h = call(part->as<Part>(), h);
    }
    return h;
  }
  [[nodiscard]] Part& part(std::size_t i) { return *parts[i]->as<Part>(); }
  [[nodiscard]] std::int64_t width() const { return width_; }

  torch::nn::ModuleList parts;

 private:
  std::int64_t width_;
};

/// Data of step `s`, [6, width].
inline at::Tensor part_input(const PartModel& model, std::int64_t s, c10::Device device) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(300 + s));
  return at::randn({6, model.width()}, generator, at::kFloat).to(device);
}

/// Part `i` of `model`, to be graphed as "part<i>".
inline Callable part_callable(const PartModel& model, std::size_t i) {
  return {"part" + std::to_string(i), [](Part& part, const Tensors& in) { return Tensors{part.forward(in[0])}; },
          model.parts.ptr()->ptr<Part>(i)};
}

/// A model with an engine, and its twin that trains plainly on the same data with the same seeds.
template <class Model>
class Twins {
 public:
  using Act = std::function<void(Model& model, std::int64_t s)>;

  explicit Twins(const Options& options) : Twins(options, [] { return std::make_shared<Model>(); }) {}
  Twins(const Options& options, const std::function<std::shared_ptr<Model>()>& make) : mine(make()), plain(make()) {
    mine->to(options.device());
    plain->to(options.device());
    engine = std::make_unique<OffloadEngine>(*mine, options);
  }

  /// `act` on both, outside of steps.
  void both(const std::function<void(Model& model)>& act) {
    act(*mine);
    act(*plain);
  }
  /// One step of both: the same gradients and buffers.
  void expect_plain(std::int64_t s, const Act& act) {
    testing_model::expect_plain(
        s, s + 1,
        [&](std::int64_t step) {
          torch::manual_seed(static_cast<std::uint64_t>(step));
          return train_step(*mine, engine.get(), [&] { act(*mine, step); });
        },
        [&](std::int64_t step) {
          torch::manual_seed(static_cast<std::uint64_t>(step));
          return train_step(*plain, nullptr, [&] { act(*plain, step); });
        });
  }
  void expect_plain(std::int64_t first, std::int64_t last, const Act& act) {
    for (std::int64_t s = first; s < last; ++s) {
      expect_plain(s, act);
    }
  }
  /// How often graphs were launched in the latest step.
  [[nodiscard]] std::int64_t replays() const { return engine->report().replays; }
  [[nodiscard]] std::int64_t captures() const { return engine->report().captures; }

  std::shared_ptr<Model> mine, plain;
  std::unique_ptr<OffloadEngine> engine;
};

}  // namespace sidestream::testing_model
