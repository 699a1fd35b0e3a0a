// Two microbatches in flight without chunks, with eager work between two graphed calls.
#include <cstdint>
#include <ostream>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"

namespace sidestream::testing_model {
namespace {

/// A layer with a value as argument.
class Scaled : public torch::nn::Module {
 public:
  explicit Scaled(c10::Device device) : linear(register_module("linear", torch::nn::Linear(kHidden, kHidden))) {
    to(device);
  }
  at::Tensor forward(const at::Tensor& x, double scale) { return linear(x).sin() * scale; }
  torch::nn::Linear linear;
};

class ScaledStack : public torch::nn::Module {
 public:
  explicit ScaledStack(c10::Device device) {
    torch::manual_seed(5);
    for (const char* const name : {"first", "second", "third"}) {
      layers.push_back(register_module(name, std::make_shared<Scaled>(device)));
    }
  }
  std::vector<std::shared_ptr<Scaled>> layers;
};

enum class Reason : std::uint8_t { new_value, eval_mode, frozen_weight };

std::ostream& operator<<(std::ostream& out, Reason reason) {
  return out << (reason == Reason::new_value   ? "new_value"
                 : reason == Reason::eval_mode ? "eval_mode"
                                               : "frozen_weight");
}

/// For one reason, a layer of one microbatch cannot replay in the steps 3 and 4.
class MicrobatchReplayTest : public testing::TestWithParam<Reason> {
 protected:
  struct Odd {
    std::size_t microbatch = 0;
    std::size_t layer = 1;
  };

  void run(ScaledStack& model, std::int64_t s, const Odd& odd, bool layer_by_layer) const {
    std::vector<at::Tensor> h;
    for (const std::int64_t microbatch : {0, 1}) {
      h.push_back(rows(s, device_, microbatch).requires_grad_(true));
    }
    const auto run_layer = [&](std::size_t microbatch, std::size_t layer) {
      const bool is_odd = (s == 3 || s == 4) && microbatch == odd.microbatch && layer == odd.layer;
      Scaled& called = *model.layers[layer];
      called.train(!is_odd || GetParam() != Reason::eval_mode);
      called.linear->weight.requires_grad_(!is_odd || GetParam() != Reason::frozen_weight);
      h[microbatch] = call(&called, h[microbatch] * 2, is_odd && GetParam() == Reason::new_value ? 2.0 : 1.0);
      called.train();
      called.linear->weight.requires_grad_(true);
    };
    const std::size_t layers = model.layers.size();
    for (std::size_t i = 0; i < 2 * layers; ++i) {
      run_layer(layer_by_layer ? i % 2 : i / layers, layer_by_layer ? i / 2 : i % layers);
    }
    for (const at::Tensor& output : h) {
      output.square().mean().backward();
    }
  }
  void expect_plain_steps(const Odd& odd, bool layer_by_layer) {
    OffloadEngine engine(model_, Options(device_).min_bytes(256).graph("*").offload("*"));
    std::int64_t eager = 0;
    for (std::int64_t s = 0; s < 7; ++s) {
      expect_same_step(model_, &engine, plain_, s, [&](ScaledStack& model) { run(model, s, odd, layer_by_layer); });
      const std::int64_t now = engine.report().eager_calls;
      EXPECT_LE(now - eager, s == 0 ? 6 : s == 3 || s == 4 ? 1 : 0) << "step " << s;
      eager = now;
    }
  }

  c10::Device device_ = find_device("sim");
  ScaledStack model_{device_};
  ScaledStack plain_{device_};
};

TEST_P(MicrobatchReplayTest, ACallGoesOnInTheCapturesOfItsMicrobatch) { expect_plain_steps({0, 1}, false); }

TEST_P(MicrobatchReplayTest, AfterAnEagerCallTheNextOneGoesOnToo) { expect_plain_steps({1, 1}, false); }

TEST_P(MicrobatchReplayTest, TheLastCallOfTheFirstMicrobatch) { expect_plain_steps({0, 2}, false); }

TEST_P(MicrobatchReplayTest, MicrobatchesThatGoThroughEachLayerTogether) { expect_plain_steps({0, 1}, true); }

INSTANTIATE_TEST_SUITE_P(Reasons, MicrobatchReplayTest,
                         testing::Values(Reason::new_value, Reason::eval_mode, Reason::frozen_weight),
                         [](const auto& info) { return testing::PrintToString(info.param); });

}  // namespace
}  // namespace sidestream::testing_model
