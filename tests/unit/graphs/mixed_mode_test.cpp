// Callables whose submodules are partly in training, partly in eval mode.
#include <functional>
#include <memory>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"

namespace sidestream::testing_model {
namespace {

/// A frozen normalisation and one that learns, between layers that train.
class PartlyFrozen : public torch::nn::Module {
 public:
  explicit PartlyFrozen(c10::Device device) {
    torch::manual_seed(5);
    first = register_module("first", torch::nn::Linear(32, 32));
    frozen = register_module("frozen", torch::nn::BatchNorm1d(32));
    learning = register_module("learning", torch::nn::BatchNorm1d(32));
    dropout = register_module("dropout", torch::nn::Dropout(0.25));
    to(device);
    const at::NoGradGuard no_grad;
    frozen->running_mean.fill_(0.25);
    frozen->running_var.fill_(2.0);
    freeze();
  }
  void freeze() {
    train();
    frozen->eval();
    for (at::Tensor& parameter : frozen->parameters()) {
      parameter.requires_grad_(false);
    }
  }
  at::Tensor forward(const at::Tensor& x) { return dropout(learning(frozen(first(x)).relu())); }

  torch::nn::Linear first{nullptr};
  torch::nn::BatchNorm1d frozen{nullptr};
  torch::nn::BatchNorm1d learning{nullptr};
  torch::nn::Dropout dropout{nullptr};
};

class MixedModeTest : public testing::Test {
 protected:
  void SetUp() override {
    layers_ = make_graphed_callables(
        engine_,
        {Callable(
            "partly", [](PartlyFrozen& model, const Tensors& in) { return Tensors{model.forward(in[0])}; }, mine_)},
        {{input(0)}});
  }
  [[nodiscard]] at::Tensor input(std::int64_t s) const { return rows(s, device_).requires_grad_(true); }

  StepTensors step(PartlyFrozen& model, bool graphed, std::int64_t s) {
    torch::manual_seed(static_cast<std::uint64_t>(100 + s));
    const at::Tensor x = input(s);
    at::Tensor y;
    StepTensors result = train_step(model, nullptr, [&] {
      y = graphed ? layers_[0]({x})[0] : model.forward(x);
      (y * rows(s, device_, 1)).mean().backward();
    });
    result.emplace_back("output", y);
    result.emplace_back("gradient of the input", x.grad());
    return result;
  }
  void expect_plain(std::int64_t first, std::int64_t last) {
    testing_model::expect_plain(
        first, last, [&](std::int64_t s) { return step(*mine_, true, s); },
        [&](std::int64_t s) { return step(*plain_, false, s); });
  }
  [[nodiscard]] std::int64_t replays_of(const std::function<void()>& run) {
    { const auto step = engine_.step(); }  // takes what was done before it
    {
      const auto step = engine_.step();
      run();
    }
    return engine_.report().replays;
  }

  c10::Device device_ = find_device("sim");
  std::shared_ptr<PartlyFrozen> mine_ = std::make_shared<PartlyFrozen>(device_);
  std::shared_ptr<PartlyFrozen> plain_ = std::make_shared<PartlyFrozen>(device_);
  OffloadEngine engine_{*mine_, Options(device_)};
  std::vector<GraphedCallable> layers_;
};

TEST_F(MixedModeTest, AFrozenNormalisationInsideATrainingModuleReplaysRight) {
  const at::Tensor mean = mine_->frozen->running_mean.cpu();
  EXPECT_FALSE(mine_->frozen->is_training()) << "a capture leaves the modes as they were";
  EXPECT_TRUE(mine_->learning->is_training());
  expect_plain(0, 4);
  EXPECT_TRUE(at::equal(mine_->frozen->running_mean.cpu(), mean)) << "frozen statistics stay";
  EXPECT_EQ(mine_->learning->num_batches_tracked.item<std::int64_t>(), 4) << "the others count each replay, no warm-up";
  EXPECT_EQ(replays_of([&] { expect_plain(4, 5); }), 2);
}

// The mode of any submodule is a guard.
TEST_F(MixedModeTest, AnotherModeOfASubmoduleRunsEagerlyAndRight) {
  const auto both = [&](const std::function<void(PartlyFrozen&)>& change) {
    change(*mine_);
    change(*plain_);
  };
  expect_plain(0, 1);
  both([](PartlyFrozen& model) { model.train(); });
  EXPECT_EQ(replays_of([&] { expect_plain(1, 2); }), 0) << "the frozen one learns now";
  EXPECT_NE(mine_->frozen->running_mean[0].item<float>(), 0.25F);
  both([](PartlyFrozen& model) {
    model.freeze();
    model.dropout->eval();
  });
  EXPECT_EQ(replays_of([&] { expect_plain(2, 3); }), 0);
  both([](PartlyFrozen& model) { model.eval(); });
  EXPECT_EQ(replays_of([&] { expect_plain(3, 4); }), 0);
  both([](PartlyFrozen& model) { model.freeze(); });
  EXPECT_EQ(replays_of([&] { expect_plain(4, 5); }), 2) << "as captured again";
}

}  // namespace
}  // namespace sidestream::testing_model
