// Callables that are captured in the order of a step: orders and calls that are refused, and steps that fail.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "models/plain_twin.h"
#include "sidestream/bucketed_callables.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/graphed_step.h"
#include "sidestream/pipeline_order.h"
#include "unit/graphs/callable_order.h"

namespace sidestream::testing_model {
namespace {

using CallableOrderErrorTest = CallableOrderTest;

TEST_F(CallableOrderErrorTest, OtherOrdersAreRefusedBeforeTheyOverwriteAnything) {
  OffloadEngine engine(model_, options());
  capture(engine, GraphOptions().order(one_stage_), 2);
  expect_replays(engine, 0, one_stage_);
  const auto forward = [](std::int64_t m) { return PipelineStep{0, m, Kind::forward}; };
  const auto backward = [](std::int64_t m) { return PipelineStep{0, m, Kind::backward}; };
  const std::string forward_too_early =
      "graphed call \"layers.0\" (stage 0, microbatch 3): expected the backward of graphed call \"layers.1\" (stage 0, "
      "microbatch 0), got this forward";
  const std::string backward_too_early =
      "graphed call \"layers.1\" (stage 0, microbatch 1): expected the backward of graphed call \"layers.1\" (stage 0, "
      "microbatch 0), got this backward; run the chunks in the order that GraphOptions::order was given, and each "
      "backward to its end before the next one begins";
  for (const Told told : {Told::nothing, Told::chunks}) {
    expect_refused(engine, forward_too_early, {forward(0), forward(1), forward(2), forward(3)}, told);
    expect_refused(engine, backward_too_early, {forward(0), forward(1), backward(1)}, told);
    expect_replays(engine, 2, one_stage_, told);
  }
  expect_refused(engine, "(stage 0, microbatch 1): expected the backward of", {forward(2), forward(1)}, Told::chunks);
  expect_refused(engine,
                 "expected a chunk of stage 0 that has a backward in GraphOptions::order, got stage 0, "
                 "microbatch 6",
                 {forward(6)}, Told::chunks);
  expect_replays(engine, 3, one_stage_);
}

// What a refused call would have overwritten is still there: the step goes on.
TEST_F(CallableOrderErrorTest, ARefusedForwardMayBeLeftOut) {
  OffloadEngine engine(model_, options());
  capture(engine, GraphOptions().order(one_stage_), 2);
  expect_same_step(model_, nullptr, plain_, 0, [&](CalledStack& model) {
    StepTensors given;
    Chunks in_flight;
    std::optional<Step> step;
    if (&model == &model_) {
      step.emplace(engine.step());
    }
    for (std::int64_t i = 0; i < 3; ++i) {
      run(model, nullptr, {0, i, Kind::forward}, 0, in_flight, given);
    }
    if (step) {
      EXPECT_THROWS(UsageError, "got this forward", (void)graphed_[0]({rows(7, device_).requires_grad_()}));
    }
    for (std::size_t i = 3; i < one_stage_.size(); ++i) {
      const PipelineStep& work = one_stage_[i];
      if (work.microbatch < 3) {
        run(model, nullptr, work, 0, in_flight, given);
      }
    }
    if (step) {
      step->finish();
    }
    return given;
  });
}

TEST_F(CallableOrderErrorTest, ACallInAChunkOfAnotherStageIsRefused) {
  OffloadEngine engine(model_, options());
  capture(engine, GraphOptions().order(order_));
  {
    const Step step = engine.step();
    const Chunk chunk = engine.chunk({1, 2});
    EXPECT_THROWS(UsageError, "graphed call \"layers.0\": expected a chunk of stage 0",
                  (void)graphed_[0]({rows(0, device_).requires_grad_()}));
  }
  expect_replays(engine, 1, order_, Told::chunks);
}

TEST_F(CallableOrderErrorTest, AStepThatFailsLeavesThemUsable) {
  for (const Order& order : {order_, with_a_rest()}) {
    OffloadEngine engine(model_, options());
    capture(engine, GraphOptions().order(order), order == order_ ? kLayers : 2);
    for (std::size_t length = 1; length < order.size(); ++length) {
      {
        const Step fails = engine.step();
        run_in_vain({order.begin(), order.begin() + static_cast<std::ptrdiff_t>(length)});
      }
      expect_replays(engine, static_cast<std::int64_t>(length), order);
    }
  }
}

TEST_F(CallableOrderErrorTest, OrdersThatDoNotFitTheCallables) {
  const GraphOptions good = GraphOptions().order(order_);
  expect_bad("the order has stage 1, but no callable is of that stage", good, 2);
  expect_bad("callable \"layers.2\" is of stage 1, which has no backward in the order",
             GraphOptions().order(one_stage_));
  expect_bad("has no backward, so nothing is captured", GraphOptions().order({{0, 0, Kind::forward}}), 2);
  expect_bad("GraphOptions::order: the order has the backward of stage 0, microbatch 0, but not the forward",
             GraphOptions().order({{0, 0, Kind::backward}}), 2);
  expect_bad("has weight gradients as steps (stage 1, microbatch 0), but the backward computes them; set",
             GraphOptions().order(pipeline_order(PipelineShape{2, 2, 4, 0, true}, 0)));
  expect_bad(
      "needs 9 captures of a callable, one for each microbatch, but the engine's CallOptions::max_captures "
      "allows 8",
      GraphOptions().order(pipeline_order(PipelineShape{2, 1, 9}, 0)), 2);
  for (const GraphOptions& bad :
       {GraphOptions(good).retain_graph_in_backward(true), GraphOptions(good).forward_only(true)}) {
    expect_bad("GraphOptions::order is set together with retain_graph_in_backward or forward_only", bad);
  }
  OffloadEngine engine(model_, options());
  std::vector<std::vector<Sample>> linked = samples();
  linked[2] = {Sample::output_of(1)};
  EXPECT_THROWS(UsageError, "callable \"layers.2\" takes an output of \"layers.1\", which is of another stage",
                (void)make_graphed_callables(engine, callables(), linked, good));
  EXPECT_THROWS(UsageError, "GraphOptions::order works only with make_graphed_callables",
                (void)make_bucketed_callables(engine, callables(), {samples()}, BucketOptions().graph(good)));
  EXPECT_THROWS(UsageError, "order",
                (void)make_graphed_step(engine, callables()[0], {{rows(0, device_)}}, StepOptions().graph(good)));
  EXPECT_THROWS(UsageError, "GraphOptions::order is set in the engine's GraphOptions",
                OffloadEngine(model_, options().graph_options(good)));
  capture(engine, good);
  expect_replays(engine, 0, order_);
}

}  // namespace
}  // namespace sidestream::testing_model
