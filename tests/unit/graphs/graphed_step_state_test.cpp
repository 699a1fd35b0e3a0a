// What a whole step leaves behind, and what it keeps: tensors of modules, versions, gradients, journals, verification.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include "expect_throws.h"
#include "sidestream/error.h"
#include "unit/graphs/graphed_step_fixture.h"

namespace sidestream {
namespace {

using testing_model::rows;
using testing_model::same;
using testing_model::WholeStepTrainer;

class WholeStepStateTest : public testing::Test {
 protected:
  static constexpr std::int64_t kStateSteps = 4;

  /// Each step of a training with `options` is plain training's.
  void expect_plain(WholeStepTrainer& mine, bool in_steps) const {
    WholeStepTrainer plain(device_, mine.form);
    for (std::int64_t s = 0; s < kStateSteps; ++s) {
      torch::manual_seed(40 + s);
      const auto got = [&] {
        if (!in_steps) {
          return mine.run(s);
        }
        Step step = mine.engine->step();
        auto result = mine.run(s);
        step.finish();
        return result;
      }();
      torch::manual_seed(40 + s);
      EXPECT_TRUE(same(got, plain.run(s))) << "step " << s;
    }
  }

  c10::Device device_ = find_device("sim");
};

/// Keeps what its forward made in a member.
class StepKeepingModel : public torch::nn::Module {
 public:
  StepKeepingModel() : weight_(register_parameter("weight", at::full({32}, 0.5))) {}
  static Tensors loss(StepKeepingModel& model, const Tensors& inputs) {
    const at::Tensor y = inputs[0] * model.weight_;
    model.kept = (y * 2).detach();
    return {(y * inputs[1]).sum()};
  }
  at::Tensor kept;

 private:
  at::Tensor weight_;
};

TEST_F(WholeStepStateTest, WhatAModuleKeepsHasAValueAndFollowsReplays) {
  auto model = std::make_shared<StepKeepingModel>();
  model->to(device_);
  AdamW optimizer(model->parameters(), 0.1);
  OffloadEngine engine(*model, Options(device_));
  const Tensors sample{rows(50, device_), rows(51, device_)};
  GraphedStep step = make_graphed_step(engine, Callable("step", &StepKeepingModel::loss, model), {sample},
                                       StepOptions().update([&] { optimizer.step(); }));
  EXPECT_TRUE(at::equal(model->kept.cpu(), sample[0].cpu()));  // 2 * 0.5 * x
  EXPECT_TRUE(at::equal(model->parameters()[0].detach().cpu(), at::full({32}, 0.5)));
  EXPECT_EQ(optimizer.state()[0].step.cpu().item<float>(), 0);
  const Tensors inputs{rows(52, device_), rows(53, device_)};
  (void)step({inputs});
  EXPECT_TRUE(at::equal(model->kept.cpu(), inputs[0].cpu()));
  EXPECT_EQ(optimizer.state()[0].step.cpu().item<float>(), 1);
}

TEST_F(WholeStepStateTest, TrainsInsideOfStepsThatAreChecked) {
  WholeStepTrainer mine(device_, {.layers = 4, .microbatches = 2, .updates = true});
  mine.graph(Options(device_).offload("**").min_bytes(1024).check_steps(true));
  expect_plain(mine, /*in_steps=*/true);
  EXPECT_EQ(mine.engine->report().steps, kStateSteps);
}

TEST_F(WholeStepStateTest, IsVerifiedAsCallsAre) {
  WholeStepTrainer mine(device_, {.microbatches = 2, .extras = {.dropout = 0.2, .batch_norm = true}, .updates = true});
  mine.graph(Options(device_).verify_replays(2));
  expect_plain(mine, /*in_steps=*/true);
}

TEST_F(WholeStepStateTest, AnEagerBackwardThroughUpdatedParametersIsRefused) {
  WholeStepTrainer mine(device_, {.updates = true});
  mine.graph(Options(device_));
  const at::Tensor loss = testing_model::stack_loss(*mine.model, mine.data(3)[0])[0];
  (void)mine.run(0);
  EXPECT_THROWS(c10::Error, "modified by an inplace operation", loss.backward());
}

TEST_F(WholeStepStateTest, GradientsTakeThePlaceOfThoseThatWereThere) {
  WholeStepTrainer mine(device_, {});
  WholeStepTrainer plain(device_, {});
  mine.graph(Options(device_));
  const at::Tensor held = at::ones_like(mine.model->parameters()[0]);
  mine.model->parameters()[0].mutable_grad() = held;
  EXPECT_TRUE(same(mine.run(0), plain.run(0)));
  EXPECT_TRUE(at::equal(held.cpu(), at::ones_like(held.cpu())));
  (*mine.step)(mine.data(1));
  mine.model->zero_grad(/*set_to_none=*/false);
  EXPECT_TRUE(same(mine.run(2), plain.run(2)));
}

/// A weight that eval mode leaves out.
class LighterInEvalModel : public torch::nn::Module {
 public:
  LighterInEvalModel()
      : always_(register_parameter("always", at::full({32}, 0.5))),
        trained_(register_parameter("trained", at::full({32}, 0.25))) {}
  static Tensors loss(LighterInEvalModel& model, const Tensors& inputs) {
    at::Tensor y = inputs[0] * model.always_;
    y = model.is_training() ? y * model.trained_ : y;
    return {(y * inputs[1]).sum()};
  }

 private:
  at::Tensor always_, trained_;
};

TEST_F(WholeStepStateTest, AnEagerRunLeavesNoGradientsOfTheGraphs) {
  for (const bool accumulate : {false, true}) {
    auto mine = std::make_shared<LighterInEvalModel>();
    LighterInEvalModel plain;
    mine->to(device_);
    plain.to(device_);
    OffloadEngine engine(*mine, Options(device_));
    const auto data = [&](std::int64_t s) { return Tensors{rows(s, device_), rows(s, device_, 1)}; };
    GraphedStep step = make_graphed_step(engine, Callable("step", &LighterInEvalModel::loss, mine), {data(9)},
                                         StepOptions().accumulate(accumulate));
    for (std::int64_t s = 0; s < 4; ++s) {
      mine->train(s % 2 == 0);
      plain.train(s % 2 == 0);
      mine->zero_grad();
      plain.zero_grad();
      (void)step({data(s)});
      LighterInEvalModel::loss(plain, data(s))[0].backward();
      EXPECT_TRUE(same(testing_model::gradients(*mine), testing_model::gradients(plain))) << "step " << s;
    }
  }
}

TEST_F(WholeStepStateTest, ResetGivesItsMemoryBack) {
  WholeStepTrainer mine(device_, {.layers = 4});
  mine.graph(Options(device_).offload("**").min_bytes(1024));
  (void)mine.run(0);
  EXPECT_GT(mine.engine->report().pinned_bytes, 0);
  mine.step->reset();
  EXPECT_EQ(mine.engine->report().pinned_bytes, 0);
  EXPECT_EQ(mine.step->captures(), 0U);
}

}  // namespace
}  // namespace sidestream
