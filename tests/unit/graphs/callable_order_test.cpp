// Callables that are captured in the order of a step. pipeline_rank_test.cpp trains the orders of pipelines with them.
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "expect_throws.h"
#include "models/plain_twin.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graph_pool.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/pipeline_order.h"
#include "unit/graphs/callable_order.h"

namespace sidestream::testing_model {
namespace {

TEST_F(CallableOrderTest, EachCallReplaysTheCaptureOfItsMicrobatch) {
  for (const GradientPolicy policy : {GradientPolicy::cloned, GradientPolicy::owned, GradientPolicy::accumulated}) {
    OffloadEngine engine(model_, options());
    capture(engine, GraphOptions().order(order_).gradients("**", policy));
    std::int64_t s = 0;
    for (const Told told : {Told::nothing, Told::chunks, Told::order, Told::nothing}) {
      expect_replays(engine, s++, order_, told);
      expect_replays(engine, s++, order_, told);
      EXPECT_GT(engine.report().offloaded_bytes, 0);
    }
    EXPECT_EQ(engine.report().captures, 2 * kLayers * 4);
    graphed_.clear();
  }
}

TEST_F(CallableOrderTest, DelayedWeightGradientsAreStepsOfTheOrder) {
  PipelineShape shape{2, 2, 4};
  shape.delay_weight_gradients = true;
  const Order delayed = pipeline_order(shape, 0);
  OffloadEngine engine(model_, options());
  capture(engine, GraphOptions().order(delayed).gradients("**", GradientPolicy::delayed));
  std::int64_t s = 0;
  for (const Told told : {Told::nothing, Told::chunks, Told::order, Told::nothing}) {
    expect_replays(engine, s++, delayed, told);
    expect_replays(engine, s++, delayed, told);
    EXPECT_GT(engine.report().offloaded_bytes, 0);
  }
}

TEST_F(CallableOrderTest, WeightGradientsThatTheOrderDoesNotNameAreItsLastSteps) {
  Order last = one_stage_;
  for (std::int64_t m = 0; m < 6; ++m) {
    last.push_back({0, m, Kind::weight_gradients});
  }
  OffloadEngine engine(model_, options());
  capture(engine, GraphOptions().order(one_stage_).gradients("**", GradientPolicy::delayed), 2);
  expect_replays(engine, 0, last);
  expect_replays(engine, 1, last, Told::chunks);
}

TEST_F(CallableOrderTest, NothingOverwritesWhatDelayedWeightGradientsNeed) {
  const auto of = [](std::int64_t m, Kind kind) { return PipelineStep{0, m, kind}; };
  const Order order{of(0, Kind::forward),          of(0, Kind::backward), of(0, Kind::weight_gradients),
                    of(2, Kind::forward),          of(1, Kind::forward),  of(1, Kind::backward),
                    of(1, Kind::weight_gradients), of(2, Kind::backward), of(2, Kind::weight_gradients)};
  OffloadEngine engine(model_, options());
  capture(engine, GraphOptions().order(order).gradients("**", GradientPolicy::delayed), 2);
  expect_replays(engine, 0, order);
  const std::string text =
      "graphed call \"layers.0\" (stage 0, microbatch 2): expected backward_dw of graphed call \"layers.0\" (stage 0, "
      "microbatch 0), got this forward; compute the delayed weight gradients before this call";
  expect_refused(engine, text, {of(0, Kind::forward), of(0, Kind::backward), of(2, Kind::forward)}, Told::chunks);
  expect_replays(engine, 1, order);
}

class CallableOrderOfDraws : public CallableOrderTest {
 protected:
  CallableOrderOfDraws() : CallableOrderTest({.dropout = 0.3, .batch_norm = true}) {}
};

TEST_F(CallableOrderOfDraws, DropoutAndRunningStatisticsAreThoseOfPlainTraining) {
  OffloadEngine engine(model_, options());
  capture(engine, GraphOptions().order(order_));
  for (std::int64_t s = 0; s < 3; ++s) {
    expect_replays(engine, s, order_);
  }
  EXPECT_EQ(model_.buffers().size(), 2 * kLayers) << "the running statistics were compared";
}

TEST_F(CallableOrderTest, TheOrderGoesOnWhereNothingIsInFlight) {
  const Order order = with_a_rest();
  OffloadEngine engine(model_, options());
  capture(engine, GraphOptions().order(order), 2);
  for (std::int64_t s = 0; s < 4; ++s) {
    expect_replays(engine, s, order, s % 2 == 0 ? Told::nothing : Told::chunks);
  }
  EXPECT_EQ(engine.report().captures, 2 * 2 * 3);
}

TEST_F(CallableOrderTest, MicrobatchesThatAreNeverInFlightTogetherShareCaptures) {
  Order order;
  for (std::int64_t m = 0; m < 12; ++m) {
    const Order both = forward_and_backward(m);
    order.insert(order.end(), both.begin(), both.end());
  }
  OffloadEngine engine(model_, options());
  capture(engine, GraphOptions().order(order), 2);
  expect_replays(engine, 0, order);
  expect_replays(engine, 1, order, Told::chunks);
  EXPECT_EQ(engine.report().captures, 2 * 2);
}

TEST_F(CallableOrderTest, PartsThatDifferInTheOrderOfTheirBackwardsShareNone) {
  Order order = {{0, 0, Kind::forward}, {0, 1, Kind::forward}, {0, 1, Kind::backward}, {0, 0, Kind::backward}};
  for (const Kind kind : {Kind::forward, Kind::backward}) {
    for (const std::int64_t m : {2, 3}) {
      order.push_back({0, m, kind});
    }
  }
  OffloadEngine engine(model_, options());
  capture(engine, GraphOptions().order(order), 2);
  expect_replays(engine, 0, order);
  expect_replays(engine, 1, order, Told::chunks);
}

TEST_F(CallableOrderTest, AStepWithFewerMicrobatchesReplaysThem) {
  OffloadEngine engine(model_, options());
  capture(engine, GraphOptions().order(one_stage_), 2);
  std::int64_t s = 0;
  for (const Told told : {Told::nothing, Told::order}) {
    expect_replays(engine, s++, one_stage_, told);
    expect_replays(engine, s++, pipeline_order(PipelineShape{3, 1, 2}, 0), told);
    expect_replays(engine, s++, one_stage_, told);
  }
}

TEST_F(CallableOrderTest, WithoutStepsTheOrderRepeats) {
  OffloadEngine engine(model_, options());
  capture(engine, GraphOptions().order(order_));
  for (std::int64_t s = 0; s < 3; ++s) {
    expect_plain_step(engine, s, order_, Told::no_step);
  }
}

TEST_F(CallableOrderTest, WithoutStepsTheOrderBeginsAnewWhenNothingIsInFlight) {
  OffloadEngine engine(model_, options());
  capture(engine, GraphOptions().order(order_));
  for (std::size_t length = 1; length < order_.size(); ++length) {
    run_in_vain({order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(length)});
    expect_plain_step(engine, 0, order_, Told::no_step);
  }
}

/// Callables of one stage, in an order after whose first backward nothing is in flight.
class CallableOrderWithARest : public CallableOrderTest {
 protected:
  void SetUp() override {
    capture(engine_, GraphOptions().order(rest_), 2);
    expect_passes();
  }
  [[nodiscard]] Order first(std::size_t length) const {
    return {rest_.begin(), rest_.begin() + static_cast<std::ptrdiff_t>(length)};
  }
  /// Passes without a step, a step, and another pass run in the order.
  void expect_passes() {
    for (const Told told : {Told::no_step, Told::no_step, Told::nothing, Told::no_step}) {
      expect_plain_step(engine_, next_++, rest_, told);
    }
    EXPECT_EQ(engine_.report().eager_calls, 0);
  }
  void expect_refused_pass(const std::string& text, const Order& runs) {
    EXPECT_THROWS(UsageError, text.c_str(), run_in_vain(runs));
    clear_gradients(model_);
  }

  const Order rest_ = with_a_rest();
  OffloadEngine engine_{model_, options()};
  std::int64_t next_ = 0;
};

TEST_F(CallableOrderWithARest, BeginsAnewAfterAStepThatEndedEarly) {
  for (std::size_t length = 1; length <= rest_.size(); ++length) {
    for (const bool fails : {true, false}) {
      try {
        const Step step = engine_.step();
        run_in_vain(first(length));
        if (fails) {
          throw std::runtime_error("the step fails");
        }
      } catch (const std::runtime_error&) {
      }
      expect_passes();
    }
  }
  expect_refused(engine_, "got this forward", {rest_[0], rest_[2]}, Told::chunks);
  expect_passes();
}

TEST_F(CallableOrderWithARest, BeginsAnewAfterAPassThatEndedWithAForward) {
  for (const std::size_t length : {1, 3, 4}) {
    run_in_vain(first(length));
    expect_passes();
  }
  (void)graphed_[0]({rows(0, device_).requires_grad_()});  // the pass fails between the layers
  expect_passes();
}

// The next forward may be of the same pass. So the order that runs is known to be another one only later.
TEST_F(CallableOrderWithARest, RefusesOnePassAfterOneThatEndedAtTheRest) {
  const std::string refusal = "(stage 0, microbatch 1): expected the backward of";
  run_in_vain(first(2));
  expect_refused_pass(refusal, rest_);
  expect_passes();
  {  // between the layers of that backward
    const at::Tensor between = graphed_[0]({rows(0, device_).requires_grad_()})[0];
    (void)torch::autograd::grad({graphed_[1]({between})[0].sum()}, {between});
  }
  expect_refused_pass(refusal, rest_);
  expect_passes();
}

TEST_F(CallableOrderWithARest, RefusesPassesInAnotherOrderEachTime) {
  Order alternates = forward_and_backward(0);
  alternates.insert(alternates.end(), rest_.begin(), rest_.end());
  for (int i = 0; i < 3; ++i) {
    expect_refused_pass("got this forward", {rest_[0], rest_[2]});
    expect_refused_pass("got this forward", alternates);
  }
  expect_passes();
  expect_refused_pass("got this backward", {rest_[0], rest_[1], rest_[2], rest_[3], rest_[5]});
}

struct WithoutGradient : torch::autograd::Function<WithoutGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 const torch::autograd::variable_list& /*grads*/) {
    return {at::Tensor()};
  }
};

TEST_F(CallableOrderWithARest, GoesOnAfterABackwardThatGetsNoGradient) {
  expect_plain_step(
      engine_, next_, rest_, Told::no_step,
      [&](CalledStack& model, OffloadEngine* of, const PipelineStep& work, Chunks& in_flight, StepTensors& given) {
        if (work == rest_[1]) {
          WithoutGradient::apply(in_flight[{0, 0}].second).sum().backward();
          in_flight.erase({0, 0});
        } else {
          run(model, of, work, next_, in_flight, given);
        }
      });
}

TEST_F(CallableOrderWithARest, GoesOnInAStepAfterAForwardWithoutABackward) {
  Order runs = rest_;
  runs.erase(runs.begin() + 1);
  expect_plain_step(
      engine_, next_, runs, Told::nothing,
      [&](CalledStack& model, OffloadEngine* of, const PipelineStep& work, Chunks& in_flight, StepTensors& given) {
        run(model, of, work, next_, in_flight, given);
        in_flight.erase({0, 0});
      });
}

TEST_F(CallableOrderWithARest, GoesOnAfterTheEndOfAStepWithMicrobatchesInFlight) {
  expect_same_step(model_, nullptr, plain_, next_, [&](CalledStack& model) {
    StepTensors given;
    Chunks in_flight;
    std::optional<Step> step;
    if (&model == &model_) {
      step.emplace(engine_.step());
    }
    for (const PipelineStep& work : rest_) {
      if (step && work == rest_[3]) {
        step->finish();
      }
      run(model, nullptr, work, next_, in_flight, given);
    }
    return given;
  });
}

TEST_F(CallableOrderTest, AreCapturedAgainInOrderWhenWeightsWereRelocatedOrOffloadIsSwitched) {
  OffloadEngine engine(model_, options());
  capture(engine, GraphOptions().order(order_));
  expect_replays(engine, 0, order_);
  relocate(model_);
  relocate(plain_);
  expect_replays(engine, 1, order_);
  EXPECT_EQ(engine.report().recaptures, kLayers * 4);
  engine.set_activation_offloading("all", false);
  expect_replays(engine, 2, order_);
  EXPECT_EQ(engine.report().offloaded_bytes, 0);
  engine.set_activation_offloading("all", true);
  expect_replays(engine, 3, order_);
  EXPECT_GT(engine.report().offloaded_bytes, 0);
}

TEST_F(CallableOrderTest, TheirReplaysAreVerified) {
  OffloadEngine engine(model_, options().verify_replays(100));
  capture(engine, GraphOptions().order(order_));
  for (std::int64_t s = 0; s < 3; ++s) {
    expect_plain_step(engine, s, order_, Told::nothing);
  }
  EXPECT_GT(engine.report().verified_backwards, 0);
}

TEST_F(CallableOrderTest, EvaluationInBetweenRunsEagerlyAndTakesNoTurn) {
  Order order = one_stage_;
  order.insert(order.begin() + 2, {0, 9, Kind::forward});
  OffloadEngine engine(model_, options());
  capture(engine, GraphOptions().order(order), 2);
  const auto evaluate_in_between = [&](CalledStack& model, OffloadEngine* of, const PipelineStep& work,
                                       Chunks& in_flight, StepTensors& given) {
    const at::AutoGradMode gradients(work.microbatch != 9);
    run(model, of, work, 0, in_flight, given);
    if (&work == &order.back()) {  // the last: nothing has overwritten it
      given.emplace_back("evaluated", in_flight[{0, 9}].second);
    }
  };
  for (const Told told : {Told::nothing, Told::order}) {
    expect_plain_step(engine, 0, order, told, evaluate_in_between);
  }
  EXPECT_EQ(engine.report().eager_calls, 2 * 2);
}

class LinkedToEagerTest : public CallableOrderOfDraws, public testing::WithParamInterface<bool> {};

TEST_P(LinkedToEagerTest, ACallableThatIsLinkedToOneThatRanEagerlyRunsEagerlyToo) {
  const bool ordered = GetParam();
  Order runs = one_stage_;
  if (!ordered) {
    runs = forward_and_backward(0);
    const Order next = forward_and_backward(1);
    runs.insert(runs.end(), next.begin(), next.end());
  }
  OffloadEngine engine(model_, options());
  capture(engine, ordered ? GraphOptions().order(runs) : GraphOptions(), 2);
  const Told told = ordered ? Told::chunks : Told::nothing;
  expect_replays(engine, 0, runs, told);
  for (std::int64_t s = 1; s < 3; ++s) {  // in the second of these steps, of one microbatch only
    const std::int64_t eager = engine.report().eager_calls;
    expect_plain_step(
        engine, s, runs, told,
        [&](CalledStack& model, OffloadEngine* of, const PipelineStep& work, Chunks& in_flight, StepTensors& given) {
          model.layers->at<Mlp>(0).train(s == 2 && work.microbatch != 1);
          run(model, of, work, s, in_flight, given);
          model.layers->at<Mlp>(0).train();
        });
    EXPECT_EQ(engine.report().eager_calls - eager, s == 2 ? 2 : static_cast<std::int64_t>(runs.size()));
  }
  expect_replays(engine, 3, runs, told);
  const at::Tensor output = graphed_[0]({rows(0, device_).requires_grad_()})[0];
  EXPECT_THROWS(UsageError, "pass exactly that output", (void)graphed_[1]({rows(1, device_).requires_grad_()}));
}

INSTANTIATE_TEST_SUITE_P(Orders, LinkedToEagerTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "Ordered" : "WithoutOrder"; });

TEST_F(CallableOrderTest, AfterAResetTheOthersGoOn) {
  OffloadEngine engine(model_, options());
  capture(engine, GraphOptions().order(order_));
  expect_replays(engine, 0, order_);
  graphed_[1].reset();
  EXPECT_THROWS(UsageError, "replayed after reset", (void)graphed_[1]({rows(0, device_).requires_grad_()}));
  for (std::int64_t s = 0; s < 2; ++s) {
    expect_plain_step(
        engine, s, order_, Told::nothing,
        [&](CalledStack& model, OffloadEngine* of, const PipelineStep& work, Chunks& in_flight, StepTensors& given) {
          if (&model == &model_ && work.kind == Kind::forward && work.stage == 0) {
            auto& [input, output] = in_flight[{0, work.microbatch}];
            input = rows(100 * s + work.microbatch, device_, 0).requires_grad_();
            output = model.run_layer(1, graphed_[0]({input})[0]);
          } else {
            run(model, of, work, s, in_flight, given);
          }
        });
  }
}

TEST_F(CallableOrderTest, OwnedGradientsAreNoTensorsThatACallKeeps) {
  for (const bool shared : {false, true}) {
    GraphOptions options = GraphOptions().order(order_).gradients("**", GradientPolicy::owned);
    if (shared) {
      options.pool(std::make_shared<GraphPool>(device_));
    }
    OffloadEngine engine(model_, this->options());
    capture(engine, options);
    expect_replays(engine, 0, order_);
    expect_replays(engine, 1, order_, Told::order);
    EXPECT_PRED_FORMAT2(testing::IsNotSubstring, "keeps tensors", testing::PrintToString(engine.report().notes));
    graphed_.clear();
  }
}

TEST_F(CallableOrderTest, SharesAPoolWithOtherCaptures) {
  OffloadEngine engine(model_, options());
  const auto pool = std::make_shared<GraphPool>(device_);
  capture(engine, GraphOptions().order(one_stage_).pool(pool), 2);
  const std::vector<GraphedCallable> nest =
      make_graphed_callables(engine, {callables()[2]}, {samples()[2]}, GraphOptions().pool(pool));
  for (std::int64_t s = 0; s < 3; ++s) {
    expect_plain_step(engine, s, one_stage_, Told::nothing);
    expect_same_step(model_, nullptr, plain_, s, [&](CalledStack& model) {
      const at::Tensor x = rows(s, device_).requires_grad_();
      (&model == &plain_ ? model.run_layer(2, x) : nest[0]({x})[0]).square().mean().backward();
      return values({x.grad()});
    });
  }
  EXPECT_EQ(engine.report().eager_calls, 0);
  const at::Tensor pending = nest[0]({rows(0, device_).requires_grad_()})[0];
  EXPECT_THROWS(UsageError, "the backward of graphed call \"layers.2\"",
                (void)graphed_[0]({rows(0, device_).requires_grad_()}));
  pending.sum().backward();
}

}  // namespace
}  // namespace sidestream::testing_model
