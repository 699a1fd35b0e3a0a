// Callables that are captured in the order of a step. pipeline_rank_test.cpp trains the orders of pipelines with them.
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include "expect_throws.h"
#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/bucketed_callables.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graph_pool.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/graphed_step.h"
#include "sidestream/pipeline_order.h"
#include "unit/graphs/called_stack.h"

namespace sidestream::testing_model {
namespace {

using Kind = PipelineStep::Kind;
using Order = std::vector<PipelineStep>;
using Chunks = std::map<std::pair<std::int64_t, std::int64_t>, std::pair<at::Tensor, at::Tensor>>;

Order forward_and_backward(std::int64_t microbatch) {
  return {{0, microbatch, Kind::forward}, {0, microbatch, Kind::backward}};
}

/// Nothing is in flight behind the first backward.
Order with_a_rest() {
  Order order = forward_and_backward(0);
  for (const Kind kind : {Kind::forward, Kind::backward}) {
    for (const std::int64_t m : {1, 2}) {
      order.push_back({0, m, kind});
    }
  }
  return order;
}

/// Two virtual stages of two layers, for the first of two ranks. Four microbatches.
class CallableOrderTest : public testing::Test {
 protected:
  static constexpr std::int64_t kLayers = 4;  ///< of both stages
  enum class Told : std::uint8_t {
    nothing,  ///< callables find their turn
    chunks,   ///< what chunk they are of
    order,    ///< the same, and the order of the step
  };

  explicit CallableOrderTest(const Mlp::Extras& extras = {})
      : model_(device_, extras, kLayers), plain_(device_, extras, kLayers) {}
  [[nodiscard]] Options options() const {
    return Options(device_).min_bytes(256).offload("layers.*.*").check_steps(16).lag(0);
  }
  [[nodiscard]] std::vector<Callable> callables(std::int64_t layers = kLayers) const {
    std::vector<Callable> all;
    for (std::int64_t i = 0; i < layers; ++i) {
      all.emplace_back("layers." + std::to_string(i), *(model_.layers->begin() + i));
      all.back().stage(i / 2);
    }
    return all;
  }
  [[nodiscard]] std::vector<std::vector<Sample>> samples(std::int64_t layers = kLayers) const {
    std::vector<std::vector<Sample>> all;
    for (std::int64_t i = 0; i < layers; ++i) {
      all.push_back({i % 2 == 0 ? Sample(rows(900, device_).requires_grad_()) : Sample::output_of(i - 1)});
    }
    return all;
  }
  void capture(OffloadEngine& engine, const GraphOptions& options, std::int64_t layers = kLayers) {
    graphed_ = make_graphed_callables(engine, callables(layers), samples(layers), options);
  }
  [[nodiscard]] at::Tensor forward(CalledStack& model, std::int64_t stage, at::Tensor h) const {
    for (std::int64_t i = 2 * stage; i < 2 * stage + 2; ++i) {
      const auto layer = static_cast<std::size_t>(i);
      h = &model == &plain_ ? model.run_layer(layer, h) : graphed_[layer]({h})[0];
    }
    return h;
  }
  /// Of all layers of a chunk. `engine`: null if the callables themselves are asked.
  void compute_weights(OffloadEngine* engine, const PipelineStep& work) const {
    if (engine != nullptr) {
      engine->backward_dw({work.stage, work.microbatch});
      return;
    }
    for (std::int64_t i = 2 * work.stage; i < 2 * work.stage + 2; ++i) {
      graphed_[static_cast<std::size_t>(i)].backward_dw();
    }
  }
  /// Runs `work` of step `s`.
  void run(CalledStack& model, OffloadEngine* engine, const PipelineStep& work, std::int64_t s, Chunks& in_flight,
           StepTensors& given) const {
    if (work.kind == Kind::weight_gradients) {
      if (&model == &model_) {
        compute_weights(engine, work);
      }
      return;
    }
    auto& [input, output] = in_flight[{work.stage, work.microbatch}];
    if (work.kind == Kind::forward) {
      input = rows(100 * s + work.microbatch, device_, work.stage).requires_grad_();
      std::optional<Chunk> chunk;
      if (engine != nullptr) {
        chunk.emplace(engine->chunk({work.stage, work.microbatch}));
      }
      output = forward(model, work.stage, input);
    } else {
      output.square().mean().backward();
      given.emplace_back("gradient of an input", input.grad());
      in_flight.erase({work.stage, work.microbatch});
    }
  }
  /// A step that runs `runs`.
  void expect_plain_step(OffloadEngine& engine, std::int64_t s, const Order& runs, Told told) {
    expect_same_step(model_, nullptr, plain_, s, [&](CalledStack& model) {
      torch::manual_seed(static_cast<std::uint64_t>(s));
      const bool mine = &model == &model_;
      StepTensors given;
      Chunks in_flight;
      std::optional<Step> step;
      if (mine) {
        step.emplace(told == Told::order ? engine.step(runs) : engine.step());
      }
      for (const PipelineStep& work : runs) {
        run(model, mine && told != Told::nothing ? &engine : nullptr, work, s, in_flight, given);
      }
      if (step) {
        step->finish();
      }
      return given;
    });
  }
  /// The same, and all callables replay.
  void expect_replays(OffloadEngine& engine, std::int64_t s, const Order& runs, Told told = Told::nothing) {
    const std::int64_t eager = engine.report().eager_calls;
    expect_plain_step(engine, s, runs, told);
    const Report report = engine.report();
    EXPECT_EQ(report.eager_calls, eager);
    EXPECT_EQ(report.replays, 2 * static_cast<std::int64_t>(runs.size()));  // two layers a chunk
    EXPECT_EQ(report.order_findings, std::vector<std::string>());
  }
  /// A step that begins with `runs`, and that a UsageError with `text` ends.
  void expect_refused(OffloadEngine& engine, const std::string& text, const Order& runs, Told told = Told::nothing) {
    const auto steps = [&] {
      const Step step = engine.step();
      StepTensors given;
      Chunks in_flight;
      for (const PipelineStep& work : runs) {
        run(model_, told == Told::nothing ? nullptr : &engine, work, 50, in_flight, given);
      }
    };
    EXPECT_THROWS(UsageError, text.c_str(), steps());
    clear_gradients(model_);
  }
  /// Steps that come to nothing.
  void run_in_vain(const Order& runs) {
    StepTensors given;
    Chunks in_flight;
    for (const PipelineStep& work : runs) {
      run(model_, nullptr, work, 60, in_flight, given);
    }
    in_flight.clear();
    clear_gradients(model_);
  }
  void expect_bad(const std::string& text, const GraphOptions& options, std::int64_t layers = kLayers) {
    OffloadEngine engine(model_, this->options());
    EXPECT_THROWS(UsageError, text.c_str(), capture(engine, options, layers));
  }

  c10::Device device_ = find_device("sim");
  CalledStack model_, plain_;
  std::vector<GraphedCallable> graphed_;
  Order order_ = pipeline_order(PipelineShape{2, 2, 4}, 0);
  Order one_stage_ = pipeline_order(PipelineShape{3, 1, 6}, 0);
};

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
      "microbatch 0), got this forward; compute delayed weight gradients where GraphOptions::order has them";
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
    expect_same_step(model_, nullptr, plain_, s, [&](CalledStack& model) {
      StepTensors given;
      Chunks in_flight;
      for (const PipelineStep& work : order_) {
        run(model, nullptr, work, s, in_flight, given);
      }
      return given;
    });
  }
}

TEST_F(CallableOrderTest, OtherOrdersAreRefusedBeforeTheyOverwriteAnything) {
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
TEST_F(CallableOrderTest, ARefusedForwardMayBeLeftOut) {
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

TEST_F(CallableOrderTest, ACallInAChunkOfAnotherStageIsRefused) {
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

TEST_F(CallableOrderTest, AStepThatFailsLeavesThemUsable) {
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

TEST_F(CallableOrderTest, WithoutStepsTheOrderBeginsAnewWhenNothingIsInFlight) {
  OffloadEngine engine(model_, options());
  capture(engine, GraphOptions().order(order_));
  for (std::size_t length = 1; length < order_.size(); ++length) {
    run_in_vain({order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(length)});
    expect_same_step(model_, nullptr, plain_, 0, [&](CalledStack& model) {
      StepTensors given;
      Chunks in_flight;
      for (const PipelineStep& work : order_) {
        run(model, nullptr, work, 0, in_flight, given);
      }
      return given;
    });
  }
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
  for (const Told told : {Told::nothing, Told::order}) {
    expect_same_step(model_, nullptr, plain_, 0, [&](CalledStack& model) {
      StepTensors given;
      Chunks in_flight;
      const bool mine = &model == &model_;
      std::optional<Step> step;
      if (mine) {
        step.emplace(told == Told::order ? engine.step(order) : engine.step());
      }
      for (const PipelineStep& work : order) {
        const at::AutoGradMode gradients(work.microbatch != 9);
        run(model, mine && told != Told::nothing ? &engine : nullptr, work, 0, in_flight, given);
      }
      given.emplace_back("evaluated", in_flight[{0, 9}].second);
      if (step) {
        step->finish();
      }
      return given;
    });
  }
  EXPECT_EQ(engine.report().eager_calls, 2 * 2);
}

TEST_F(CallableOrderTest, AfterAResetTheOthersGoOn) {
  OffloadEngine engine(model_, options());
  capture(engine, GraphOptions().order(order_));
  expect_replays(engine, 0, order_);
  graphed_[1].reset();
  EXPECT_THROWS(UsageError, "replayed after reset", (void)graphed_[1]({rows(0, device_).requires_grad_()}));
  for (std::int64_t s = 0; s < 2; ++s) {
    expect_same_step(model_, nullptr, plain_, s, [&](CalledStack& model) {
      StepTensors given;
      Chunks in_flight;
      const bool mine = &model == &model_;
      std::optional<Step> step;
      if (mine) {
        step.emplace(engine.step());
      }
      for (const PipelineStep& work : order_) {
        if (mine && work.kind == Kind::forward && work.stage == 0) {
          auto& [input, output] = in_flight[{0, work.microbatch}];
          input = rows(100 * s + work.microbatch, device_, 0).requires_grad_();
          output = model.run_layer(1, graphed_[0]({input})[0]);
        } else {
          run(model, nullptr, work, s, in_flight, given);
        }
      }
      if (step) {
        step->finish();
      }
      return given;
    });
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

TEST_F(CallableOrderTest, OrdersThatDoNotFitTheCallables) {
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
