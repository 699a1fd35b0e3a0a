#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"

namespace sidestream::testing_model {

/// One weight, and a forward for every kind of argument that tests need.
struct Scaler : torch::nn::Module {
  explicit Scaler(double of) : weight(register_parameter("weight", at::full({32}, of))) {}
  at::Tensor forward(const at::Tensor& x) { return (x * weight).tanh(); }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& y) { return (x * weight + y).tanh(); }
  at::Tensor forward(const std::pair<at::Tensor, at::Tensor>& both) {
    return (both.first * weight - both.second).tanh();
  }
  at::Tensor scaled(const at::Tensor& x, double factor) { return (x * weight * factor).tanh(); }
  at::Tensor with(const at::Tensor& x, const at::Tensor* table) {
    return table == nullptr ? x * weight : (x * weight + *table).tanh();
  }
  at::Tensor weight;
};

class CallArguments : public testing::Test {
 protected:
  using Loss = std::function<at::Tensor(Scaler& model, const at::Tensor& x, std::int64_t s)>;

  CallArguments() {
    model_->to(device_);
    plain_->to(device_);
  }

  [[nodiscard]] Options options() const { return Options(device_).graph("**"); }

  /// The gradients of one step with `loss`.
  StepTensors gradients_of(Scaler& model, OffloadEngine* engine, std::int64_t s, const Loss& loss) const {
    const at::Tensor x = rows(s, device_).requires_grad_(true);
    model.zero_grad();
    in_step(engine, [&] { loss(model, x, s).backward(); });
    StepTensors result = gradients(model);
    result.emplace_back("gradient of x", x.grad());
    descend(model);
    return result;
  }
  /// Steps [first, last) with an engine and plainly.
  void expect_plain(OffloadEngine& engine, std::int64_t first, std::int64_t last, const Loss& loss) {
    for (std::int64_t s = first; s < last; ++s) {
      const StepTensors mine = gradients_of(*model_, &engine, s, loss);
      EXPECT_TRUE(same(mine, gradients_of(*plain_, nullptr, s, loss))) << "step " << s;
    }
  }
  /// Each call of `loss` is captured once, and all later steps replay it.
  void expect_one_capture(const Loss& loss, std::int64_t calls = 1) {
    OffloadEngine engine(*model_, options());
    expect_plain(engine, 0, 5, loss);
    EXPECT_EQ(engine.report().captures, 2 * calls);
    EXPECT_EQ(engine.report().replays, 2 * calls);
    EXPECT_EQ(engine.report().eager_calls, calls) << "the sizing pass";
  }
  /// `of(0)` and `of(1)` are two captures, and each replays when it comes again.
  void expect_two_captures(const std::function<at::Tensor(Scaler&, const at::Tensor& x, int which)>& of) {
    OffloadEngine engine(*model_, options());
    const auto with = [&](int which) {
      return [&of, which](Scaler& model, const at::Tensor& x, std::int64_t /*s*/) { return of(model, x, which); };
    };
    expect_plain(engine, 0, 3, with(0));
    EXPECT_EQ(engine.report().captures, 2) << "the same value again";
    expect_plain(engine, 3, 6, with(1));
    EXPECT_EQ(engine.report().captures, 4) << "another value";
    expect_plain(engine, 6, 8, with(0));
    expect_plain(engine, 8, 10, with(1));
    EXPECT_EQ(engine.report().captures, 4) << "both are captured";
    EXPECT_EQ(engine.report().replays, 2);
  }

  [[nodiscard]] at::Tensor data(std::int64_t s, std::int64_t salt) const { return rows(s, device_, salt); }

  c10::Device device_ = find_device("sim");
  std::shared_ptr<Scaler> model_ = std::make_shared<Scaler>(0.7);
  std::shared_ptr<Scaler> plain_ = std::make_shared<Scaler>(0.7);
};

}  // namespace sidestream::testing_model
