// Options of LibTorch's own modules that a schedule changes: a capture bakes in their numbers.
#include <memory>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include "expect_throws.h"
#include "models/plain_twin.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

using testing_model::StepTensors;

struct OptionBlock : torch::nn::Module {
  OptionBlock() : fc(8, 8), norm(8), drop(0.1) {
    register_module("fc", fc);
    register_module("norm", norm);
    register_module("drop", drop);
  }
  at::Tensor forward(const at::Tensor& x) { return drop(norm(fc(x))).tanh(); }
  torch::nn::Linear fc;
  torch::nn::BatchNorm1d norm;
  torch::nn::Dropout drop;
};

struct OptionModel : torch::nn::Module {
  explicit OptionModel(c10::Device device) {
    torch::manual_seed(3);
    block = register_module("block", std::make_shared<OptionBlock>());
    to(device);
  }
  StepTensors step(OffloadEngine* engine, std::int64_t s) {
    torch::manual_seed(s + 1);
    const at::Tensor x = at::arange(32).reshape({4, 8}).sin().to(block->fc->weight.device()) * (s + 1);
    return testing_model::train_step(*this, engine, [&] { call(block.get(), x).square().sum().backward(); });
  }
  std::shared_ptr<OptionBlock> block;
};

class ModuleOptionTest : public testing::Test {
 protected:
  /// `change` is made to both models between steps 3 and 4, and `back` between steps 7 and 8.
  template <class Change, class Back>
  void expect_plain(OffloadEngine& engine, const Change& change, const Back& back) {
    const auto steps = [&](std::int64_t first, std::int64_t last) {
      testing_model::expect_plain(
          first, last, [&](std::int64_t s) { return mine_.step(&engine, s); },
          [&](std::int64_t s) { return plain_.step(nullptr, s); });
    };
    steps(0, 4);
    change(*mine_.block);
    change(*plain_.block);
    steps(4, 8);
    back(*mine_.block);
    back(*plain_.block);
    steps(8, 12);
  }

  c10::Device device_ = find_device("sim");
  OptionModel mine_{device_}, plain_{device_};
};

TEST_F(ModuleOptionTest, ADropoutRateIsAVariant) {
  OffloadEngine engine(mine_, Options(device_).graph("block"));
  expect_plain(
      engine, [](OptionBlock& block) { block.drop->options.p(0.6); },
      [](OptionBlock& block) { block.drop->options.p(0.1); });
  const Report report = engine.report();
  EXPECT_EQ(report.captures, 4);     // a forward and a backward for each rate
  EXPECT_EQ(report.eager_calls, 2);  // the first with each
}

TEST_F(ModuleOptionTest, SoIsTheMomentumOfANorm) {
  OffloadEngine engine(mine_, Options(device_).graph("block"));
  expect_plain(
      engine, [](OptionBlock& block) { block.norm->options.momentum(0.6); },
      [](OptionBlock& block) { block.norm->options.momentum(0.1); });
}

TEST_F(ModuleOptionTest, ARateOfEachStepRunsEagerly) {
  OffloadEngine engine(mine_, Options(device_).graph("block"));
  testing_model::expect_plain(
      0, 6,
      [&](std::int64_t s) {
        mine_.block->drop->options.p(0.1 * static_cast<double>(s));
        return mine_.step(&engine, s);
      },
      [&](std::int64_t s) {
        plain_.block->drop->options.p(0.1 * static_cast<double>(s));
        return plain_.step(nullptr, s);
      });
}

TEST_F(ModuleOptionTest, WhereNewArgumentsAreAnErrorItIsNamed) {
  OffloadEngine engine(
      mine_, Options(device_).graph("block").call_options(CallOptions().on_new_arguments(OnNewArguments::error)));
  for (std::int64_t s = 0; s < 3; ++s) {
    (void)mine_.step(&engine, s);
  }
  mine_.block->drop->options.p(0.6);
  EXPECT_THROWS(UsageError, "\"drop\": its option p is 0.6, was 0.1", (void)mine_.step(&engine, 3));
}

}  // namespace
}  // namespace sidestream
