#include "sidestream/adamw.h"

#include <limits>
#include <memory>
#include <utility>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/adamw.h>

#include "expect_throws.h"
#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/device.h"
#include "sidestream/error.h"

namespace sidestream::testing_model {
namespace {

/// Of values, after updates that rounded in another order.
constexpr double kRelative = 1e-5;
constexpr double kAbsolute = 1e-6;

class AdamWTest : public testing::Test {
 protected:
  /// Gives every parameter of the stack the gradient of step `s`.
  void backward(torch::nn::Sequential& model, std::int64_t s) const {
    clear_gradients(*model);
    (model->forward(rows(s, device_)) * rows(s, device_, 1)).sum().backward();
  }

  void expect_close(const std::vector<at::Tensor>& mine, const std::vector<at::Tensor>& theirs) const {
    ASSERT_EQ(mine.size(), theirs.size());
    for (std::size_t i = 0; i < mine.size(); ++i) {
      EXPECT_TRUE(at::allclose(mine[i].cpu(), theirs[i].cpu(), kRelative, kAbsolute)) << "parameter " << i;
    }
  }

  c10::Device device_ = find_device("sim");
};

struct Hyper {
  double lr;
  double weight_decay;
  bool amsgrad;
};

class AdamWAgainstLibTorchTest : public AdamWTest, public testing::WithParamInterface<Hyper> {};

TEST_P(AdamWAgainstLibTorchTest, UpdatesAsLibTorchDoesButForRounding) {
  const auto [lr, decay, amsgrad] = GetParam();
  torch::nn::Sequential model = layer_stack(2, device_);
  torch::nn::Sequential plain = layer_stack(2, device_);
  AdamW mine(model->parameters(), AdamWOptions(lr).weight_decay(decay).amsgrad(amsgrad).betas({0.8, 0.95}).eps(1e-6));
  torch::optim::AdamW theirs(
      plain->parameters(),
      torch::optim::AdamWOptions(lr).weight_decay(decay).amsgrad(amsgrad).betas({0.8, 0.95}).eps(1e-6));
  const at::Tensor before = plain->parameters()[2].detach().clone();
  for (std::int64_t s = 0; s < 6; ++s) {
    const double now = lr / static_cast<double>(s + 1);
    mine.set_lr(now);
    theirs.param_groups()[0].options().set_lr(now);
    backward(model, s);
    backward(plain, s);
    mine.step();
    theirs.step();
    expect_close(model->parameters(), plain->parameters());
  }
  EXPECT_FALSE(at::allclose(before.cpu(), plain->parameters()[2].cpu(), 1e-3, 1e-4));
  EXPECT_EQ(mine.state()[0].step.cpu().item<float>(), 6);
}

INSTANTIATE_TEST_SUITE_P(AdamW, AdamWAgainstLibTorchTest,
                         testing::Values(Hyper{1e-2, 0.1, false}, Hyper{1e-2, 0.0, false}, Hyper{3e-3, 0.2, true}));

TEST_F(AdamWTest, UpdatesWhatHasAGradientAndNothingElse) {
  torch::nn::Sequential model = layer_stack(2, device_);
  auto parameters = model->parameters();
  parameters[0].requires_grad_(false);
  AdamW optimizer(parameters);
  EXPECT_EQ(optimizer.state().size(), parameters.size() - 1);
  backward(model, 0);
  parameters[1].mutable_grad() = at::Tensor();
  std::vector<at::Tensor> before;
  for (const at::Tensor& parameter : parameters) {
    before.push_back(parameter.detach().clone());
  }
  optimizer.step();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_EQ(at::equal(before[i].cpu(), parameters[i].detach().cpu()), i < 2) << "parameter " << i;
  }
  EXPECT_EQ(optimizer.state()[0].step.cpu().item<float>(), 0);  // of parameter 1
  EXPECT_EQ(optimizer.state()[1].step.cpu().item<float>(), 1);
}

TEST_F(AdamWTest, GroupsHaveRatesOfTheirOwn) {
  torch::nn::Sequential model = layer_stack(2, device_);
  torch::nn::Sequential plain = layer_stack(2, device_);
  const auto halves = [](torch::nn::Sequential& of) {
    auto all = of->parameters();
    return std::make_pair(std::vector<at::Tensor>(all.begin(), all.begin() + 2),
                          std::vector<at::Tensor>(all.begin() + 2, all.end()));
  };
  auto [first, second] = halves(model);
  AdamW mine({{first, AdamWOptions(1e-2)}, {second, AdamWOptions(1e-3).weight_decay(0.5)}});
  auto [plain_first, plain_second] = halves(plain);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(plain_first, std::make_unique<torch::optim::AdamWOptions>(2e-2));
  groups.emplace_back(plain_second,
                      std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(1e-3).weight_decay(0.5)));
  torch::optim::AdamW theirs(std::move(groups));
  mine.set_lr(0, 2e-2);
  EXPECT_EQ(mine.lr(0), 2e-2);
  EXPECT_EQ(mine.lr(1), 1e-3);
  for (std::int64_t s = 0; s < 3; ++s) {
    backward(model, s);
    backward(plain, s);
    mine.step();
    theirs.step();
  }
  expect_close(model->parameters(), plain->parameters());
}

TEST_F(AdamWTest, TakesDtypesAndLayoutsTogether) {
  const auto options = at::TensorOptions(device_);
  at::Tensor wide = at::ones({4, 3}, options.dtype(at::kDouble)).requires_grad_(true);
  at::Tensor half = at::ones({4, 3}, options.dtype(at::kBFloat16)).requires_grad_(true);
  at::Tensor turned = at::arange(12, options.dtype(at::kFloat)).view({4, 3}).t().detach().requires_grad_(true);
  AdamW optimizer({wide, half, turned}, AdamWOptions(0.1).weight_decay(0));
  wide.mutable_grad() = at::ones_like(wide);
  half.mutable_grad() = at::ones_like(half);
  turned.mutable_grad() = at::arange(12, options.dtype(at::kFloat)).view({3, 4}) - 5.5;  // laid out otherwise
  const at::Tensor expected = turned.detach().cpu() - 0.1 * turned.grad().cpu().sign();  // Adam's first step
  optimizer.step();
  EXPECT_TRUE(at::allclose(wide.detach().cpu(), at::full({4, 3}, 0.9, at::kDouble), 1e-5, 1e-5));
  EXPECT_TRUE(at::allclose(half.detach().cpu().to(at::kFloat), at::full({4, 3}, 0.9), 1e-2, 1e-2));
  EXPECT_TRUE(at::allclose(turned.detach().cpu(), expected, 1e-4, 1e-4));
}

TEST_F(AdamWTest, FollowsAParameterThatLiesInAnotherLayout) {
  const auto gradient = [&](std::int64_t s) { return rows(s, device_).narrow(0, 0, 6).narrow(1, 0, 4); };
  at::Tensor mine = rows(9, device_).narrow(0, 0, 6).narrow(1, 0, 4).contiguous().requires_grad_(true);
  at::Tensor plain = mine.detach().clone().requires_grad_(true);
  const AdamWOptions options = AdamWOptions(1e-2).amsgrad(true);
  AdamW updated({mine}, options);
  AdamW expected({plain}, options);
  for (std::int64_t s = 0; s < 4; ++s) {
    if (s == 2) {
      mine.set_data(mine.detach().t().contiguous().t());
      ASSERT_NE(mine.strides(), plain.strides());
    }
    mine.mutable_grad() = gradient(s).clone();
    plain.mutable_grad() = gradient(s).clone();
    updated.step();
    expected.step();
    EXPECT_TRUE(at::equal(mine.detach().cpu(), plain.detach().cpu())) << "step " << s;
  }
  EXPECT_TRUE(at::equal(updated.state()[0].exp_avg.cpu(), expected.state()[0].exp_avg.cpu()));
  EXPECT_TRUE(at::equal(updated.state()[0].max_exp_avg_sq.cpu(), expected.state()[0].max_exp_avg_sq.cpu()));
}

TEST_F(AdamWTest, AnUpdateThatFailsLeavesNothingToTheNext) {
  at::Tensor mine = rows(9, device_).narrow(0, 0, 6).narrow(1, 0, 4).contiguous().requires_grad_(true);
  at::Tensor plain = mine.detach().clone().requires_grad_(true);
  at::Tensor sparse = at::ones({4}, device_).requires_grad_(true);
  AdamW updated({mine, sparse}, AdamWOptions(1e-2));
  AdamW expected({plain}, AdamWOptions(1e-2));
  const at::Tensor dense = mine.detach();
  mine.set_data(mine.detach().t().contiguous().t());
  mine.mutable_grad() = rows(0, device_).narrow(0, 0, 6).narrow(1, 0, 4).clone();
  sparse.mutable_grad() = at::ones({4}).to_sparse();
  EXPECT_THROWS(UsageError, "not dense", updated.step());
  sparse.mutable_grad() = at::Tensor();
  mine.set_data(dense);
  for (std::int64_t s = 0; s < 2; ++s) {
    mine.mutable_grad() = rows(s, device_).narrow(0, 0, 6).narrow(1, 0, 4).clone();
    plain.mutable_grad() = mine.grad().clone();
    updated.step();
    expected.step();
    EXPECT_TRUE(at::equal(mine.detach().cpu(), plain.detach().cpu())) << "step " << s;
    EXPECT_TRUE(at::equal(updated.state()[0].exp_avg.cpu(), expected.state()[0].exp_avg.cpu())) << "step " << s;
  }
}

TEST_F(AdamWTest, GoesOnFromSavedState) {
  torch::nn::Sequential model = layer_stack(2, device_);
  torch::nn::Sequential loaded = layer_stack(2, device_);
  AdamW optimizer(model->parameters(), AdamWOptions(1e-2).amsgrad(true));
  for (std::int64_t s = 0; s < 3; ++s) {
    backward(model, s);
    optimizer.step();
  }
  AdamW other(loaded->parameters(), AdamWOptions(1e-2).amsgrad(true));
  {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < model->parameters().size(); ++i) {
      loaded->parameters()[i].copy_(model->parameters()[i]);
    }
  }
  const void* const address = other.state()[0].exp_avg.const_data_ptr();
  other.load_state(optimizer.named_state());
  EXPECT_EQ(other.state()[0].exp_avg.const_data_ptr(), address);
  for (std::int64_t s = 3; s < 5; ++s) {
    backward(model, s);
    backward(loaded, s);
    optimizer.step();
    other.step();
  }
  for (std::size_t i = 0; i < model->parameters().size(); ++i) {
    EXPECT_TRUE(at::equal(model->parameters()[i].cpu(), loaded->parameters()[i].cpu())) << "parameter " << i;
  }
  auto state = optimizer.named_state();
  state.back().first = "nobody";
  EXPECT_THROWS(UsageError, "is missing or has another shape", other.load_state(state));
  state.pop_back();
  EXPECT_THROWS(UsageError, "pass the result of named_state()", other.load_state(state));
}

TEST_F(AdamWTest, ZeroGradSetsToNoneOrZeros) {
  torch::nn::Sequential model = layer_stack(1, device_);
  AdamW optimizer(model->parameters());
  backward(model, 0);
  optimizer.zero_grad(/*set_to_none=*/false);
  EXPECT_EQ(model->parameters()[0].grad().cpu().abs().sum().item<float>(), 0);
  optimizer.zero_grad();
  EXPECT_FALSE(model->parameters()[0].grad().defined());
}

TEST_F(AdamWTest, RefusesGradientsOfParametersThatWereFrozenWhenItWasMade) {
  torch::nn::Sequential model = layer_stack(2, device_);
  model->parameters()[0].requires_grad_(false);
  AdamW optimizer(model->parameters());
  backward(model, 0);
  optimizer.step();  // frozen, and without a gradient
  model->parameters()[0].requires_grad_(true);
  backward(model, 1);
  EXPECT_THROWS(UsageError, "did not require one when the optimizer was made", optimizer.step());
}

TEST_F(AdamWTest, WhatWasMovedFromSaysSo) {
  AdamW optimizer({at::ones({2}).to(device_).requires_grad_(true)}, 1e-2);
  AdamW moved(std::move(optimizer));
  EXPECT_EQ(optimizer.groups(), 0U);                                  // NOLINT
  EXPECT_THROWS(UsageError, "moved from", optimizer.step());          // NOLINT
  EXPECT_THROWS(UsageError, "moved from", optimizer.zero_grad());     // NOLINT
  EXPECT_THROWS(UsageError, "moved from", optimizer.set_lr(1));       // NOLINT
  EXPECT_THROWS(UsageError, "moved from", (void)optimizer.lr());      // NOLINT
  EXPECT_THROWS(UsageError, "moved from", optimizer.load_state({}));  // NOLINT
  EXPECT_EQ(moved.lr(), 1e-2);
}

TEST_F(AdamWTest, RefusesByName) {
  const at::Tensor leaf = at::ones({2}, device_).requires_grad_(true);
  EXPECT_THROWS(UsageError, "no parameters", AdamW(std::vector<at::Tensor>{}));
  EXPECT_THROWS(UsageError, "is given twice", AdamW({leaf, leaf}));
  EXPECT_THROWS(UsageError, "not a leaf", AdamW({leaf * 2}));
  EXPECT_THROWS(UsageError, "undefined", AdamW({at::Tensor()}));
  EXPECT_THROWS(UsageError, "not floating-point", AdamW({at::ones({2}, at::kLong)}));
  EXPECT_THROWS(UsageError, "lr is -1", AdamW({leaf}, AdamWOptions(-1)));
  EXPECT_THROWS(UsageError, "the betas", AdamW({leaf}, AdamWOptions().betas({0.9, 1.0})));
  AdamW optimizer({leaf});
  EXPECT_THROWS(UsageError, "learning rate", optimizer.set_lr(std::numeric_limits<double>::infinity()));
  EXPECT_THROWS(UsageError, "group 1", optimizer.set_lr(1, 1e-3));
  EXPECT_THROWS(UsageError, "group 2", (void)optimizer.state(2));
}

}  // namespace
}  // namespace sidestream::testing_model
