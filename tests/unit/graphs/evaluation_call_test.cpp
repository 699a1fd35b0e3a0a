// Calls under no_grad that replay graphs of the forward alone, in the memory of training's graphs.
#include <cstdint>
#include <string>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "models/plain_twin.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/testing/simulator.h"
#include "unit/graphs/called_stack.h"

namespace sidestream::testing_model {
namespace {

class EvaluationCallTest : public testing::TestWithParam<std::string> {
 protected:
  EvaluationCallTest() { set_schedule(device_, Schedule::parse(GetParam())); }
  ~EvaluationCallTest() override { set_schedule(device_, Schedule()); }

  [[nodiscard]] Options options(CallOptions calls = {}) const {
    return Options(device_)
        .min_bytes(1024)
        .graph("layers.*")
        .offload("layers.*.*")
        .call_options(calls.on_evaluation(OnEvaluation::capture));
  }
  at::Tensor loss(CalledStack& model, std::int64_t s) const {
    return (model.forward(rows(s, device_).requires_grad_(true)) * rows(s, device_, 1)).sum();
  }
  at::Tensor evaluate(CalledStack& model, std::int64_t s, bool training = false) const {
    const at::NoGradGuard no_grad;
    model.train(training);
    at::Tensor y = model.forward(rows(s, device_, 2));
    model.train(true);
    return y;
  }
  /// `run` gives tensors beside the gradients and buffers.
  template <class Run>
  void expect_plain(OffloadEngine& engine, std::int64_t s, const Run& run) {
    expect_same_step(model_, &engine, plain_, s, [&](CalledStack& model) {
      StepTensors extra;
      run(model, extra);
      return extra;
    });
  }
  void expect_plain_steps(OffloadEngine& engine, std::int64_t first, std::int64_t last) {
    for (std::int64_t s = first; s < last; ++s) {
      expect_plain(engine, s, [&](CalledStack& model, StepTensors& extra) {
        const at::Tensor before = evaluate(model, s);
        loss(model, s).backward();
        extra.emplace_back("evaluated before", before);
        extra.emplace_back("evaluated behind", evaluate(model, s));
      });
    }
  }

  c10::Device device_ = find_device("sim");
  static constexpr Mlp::Extras kBatchNorm{.dropout = 0.0, .batch_norm = true};
  CalledStack model_{device_, kBatchNorm};
  CalledStack plain_{device_, kBatchNorm};
};

TEST_P(EvaluationCallTest, EvaluationsReplayForwardsAlone) {
  OffloadEngine engine(model_, options());
  expect_plain_steps(engine, 0, 5);
  const Report report = engine.report();
  EXPECT_EQ(report.captures, 3 * 2 + 3);
  EXPECT_EQ(report.replays, 6 + 2 * 3);
  EXPECT_EQ(report.eager_calls, 3 * 3);
}

TEST_P(EvaluationCallTest, AnEvaluationWhileABackwardIsPendingRunsEagerly) {
  OffloadEngine engine(model_, options());
  expect_plain_steps(engine, 0, 2);
  const std::int64_t eager = engine.report().eager_calls;
  for (std::int64_t s = 2; s < 5; ++s) {
    expect_plain(engine, s, [&](CalledStack& model, StepTensors& extra) {
      const at::Tensor of_training = loss(model, s);
      extra.emplace_back("evaluated between", evaluate(model, s));
      of_training.backward();
      extra.emplace_back("loss", of_training);
    });
  }
  EXPECT_EQ(engine.report().eager_calls - eager, 3 * 3);
}

TEST_P(EvaluationCallTest, ModesAreCapturesOfTheirOwn) {
  OffloadEngine engine(model_, options());
  for (std::int64_t s = 0; s < 4; ++s) {
    expect_plain(engine, s, [&](CalledStack& model, StepTensors& extra) {
      extra.emplace_back("in training mode", evaluate(model, s, /*training=*/true));
      loss(model, s).backward();
      extra.emplace_back("in eval mode", evaluate(model, s));
    });
  }
  EXPECT_EQ(engine.report().captures, 6 + 2 * 3);
}

TEST_P(EvaluationCallTest, TheBoundIsOneOfTrainingAndOneOfEvaluation) {
  for (const OnMaxCaptures bounded : {OnMaxCaptures::eager, OnMaxCaptures::drop_least_used, OnMaxCaptures::error}) {
    OffloadEngine engine(model_, options(CallOptions().max_captures(1).on_max_captures(bounded)));
    expect_plain_steps(engine, 0, 4);
    const Report report = engine.report();
    EXPECT_EQ(report.captures, 3 * 2 + 3);
    EXPECT_EQ(report.eager_calls, 3 * 3);
  }
}

TEST_P(EvaluationCallTest, HeldOutputsOfEvaluationsKeepTheirValues) {
  OffloadEngine engine(model_, options());
  expect_plain_steps(engine, 0, 2);
  at::Tensor held;
  at::Tensor then;
  expect_plain(engine, 2, [&](CalledStack& model, StepTensors& /*extra*/) {
    const at::Tensor y = evaluate(model, 2);
    loss(model, 2).backward();
    if (&model == &model_) {
      held = y;
      then = y.clone();
    }
  });
  expect_plain_steps(engine, 3, 5);
  EXPECT_TRUE(at::equal(held, then));
}

at::Tensor twice_and(const at::Tensor& h, const at::Tensor& context) { return h * 2 + context; }

/// Of three calls the second one is not captured yet, and runs for two numbers of rows before it is.
TEST_P(EvaluationCallTest, ACallThatIsRecordedForTwoShapesLinksNoOther) {
  OffloadEngine engine(model_,
                       Options(device_).graph("f.*").call_options(CallOptions().on_evaluation(OnEvaluation::capture)));
  const at::NoGradGuard no_grad;
  const auto run = [&](std::int64_t s, std::int64_t count) {
    const at::Tensor context = rows(s, device_, 1).slice(0, 0, count);
    at::Tensor h = call("f.a", &twice_and, rows(s, device_).slice(0, 0, count), context);
    h = s == 0 ? rows(s, device_).slice(0, 0, count) : call("f.b", &twice_and, h, context);
    return call("f.c", &twice_and, h, context);
  };
  const auto run_both = [&](std::int64_t s) { return s == 0 ? at::cat({run(s, 2)}) : at::cat({run(s, 2), run(s, 3)}); };
  for (std::int64_t s = 0; s < 4; ++s) {
    const at::Tensor plain = run_both(s);
    const Step step = engine.step();
    EXPECT_TRUE(at::equal(run_both(s).cpu(), plain.cpu())) << "step " << s;
  }
  EXPECT_GT(engine.report().replays, 0);
}

INSTANTIATE_TEST_SUITE_P(Schedules, EvaluationCallTest, testing::Values("early", "late", "seed:1"),
                         [](const auto& info) {
                           return info.param == "seed:1" ? std::string("seed_1") : std::string(info.param);
                         });

}  // namespace
}  // namespace sidestream::testing_model
