// Callables whose graphs are the forward alone: they replay under no_grad, beside training's or in their memory.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "models/stack_twins.h"
#include "sidestream/bucketed_callables.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graph_pool.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/graphed_step.h"
#include "sidestream/report.h"
#include "sidestream/testing/simulator.h"

namespace sidestream::testing_model {
namespace {

class ForwardOnlyCallableTest : public testing::Test, protected StackTwins {
 protected:
  static constexpr std::int64_t kLayers = 3;

  ForwardOnlyCallableTest() : StackTwins(find_device("sim"), kLayers) {}
  ~ForwardOnlyCallableTest() override { set_schedule(device, Schedule()); }

  static GraphOptions alone() { return GraphOptions().forward_only(true); }
  void capture(const GraphOptions& options = alone()) { StackTwins::capture(options); }
  /// Replays of `run`, a step of `engine`.
  static std::int64_t replays_in(OffloadEngine& engine, const std::function<void()>& run) {
    in_step(&engine, run);
    return engine.report().replays;
  }
  void expect_evaluation(std::int64_t s, std::int64_t due) {
    at::Tensor y;
    const auto evaluate = [&] {
      const at::NoGradGuard no_grad;
      y = forward(true, rows(s, device));
    };
    EXPECT_EQ(replays_in(*engine, evaluate), due);
    EXPECT_FALSE(y.requires_grad());
    EXPECT_TRUE(at::equal(y, forward(false, rows(s, device)))) << "step " << s;
  }
  void expect_training(const std::vector<GraphedCallable>& training, std::int64_t s, std::int64_t due) {
    const StepTensors expected = step(false, s);
    StepTensors mine;
    const auto train = [&] {
      mine = step(true, s, [&](std::size_t i, const at::Tensor& h) { return training[i]({h})[0]; });
    };
    EXPECT_EQ(replays_in(*engine, train), due);
    EXPECT_TRUE(same(mine, expected)) << "step " << s;
  }

  OffloadEngine bare_{*model, Options(device)};  ///< offloads nothing
};

TEST_F(ForwardOnlyCallableTest, ReplaysWithoutGradientsAndRunsEagerlyWithThem) {
  capture();
  EXPECT_EQ(engine->report().captures, kLayers) << "no backward";
  for (std::int64_t s = 0; s < 4; s += 2) {
    expect_evaluation(s, kLayers);
    expect_training(layers, s + 1, 0);
  }
}

TEST_F(ForwardOnlyCallableTest, OneThatIsForTrainingRunsEagerlyWithoutGradients) {
  capture(GraphOptions());
  expect_evaluation(0, 0);
  expect_training(layers, 1, 2 * kLayers);
}

TEST_F(ForwardOnlyCallableTest, RunsEagerlyInInferenceMode) {
  capture();
  const c10::InferenceMode inference;
  const at::Tensor y = forward(true, rows(0, device));
  EXPECT_TRUE(at::equal(y, forward(false, rows(0, device))));
}

TEST_F(ForwardOnlyCallableTest, InTrainingsMemoryItTakesItsInputsAlone) {
  const auto reserved = [&] {
    release_cached_memory(device);
    return memory_use(device).reserved;
  };
  for (const char* schedule : {"early", "late", "d2h-late", "seed:1", "seed:2"}) {
    SCOPED_TRACE(schedule);
    set_schedule(device, Schedule::parse(schedule));
    const auto pool = std::make_shared<GraphPool>(device);
    const std::vector<GraphedCallable> training = graph_stack(*engine, model, device, GraphOptions().pool(pool));
    const std::int64_t before = reserved();
    capture(alone().pool(pool));
    EXPECT_EQ(reserved(), before) << "its input is small";
    for (std::int64_t s = 0; s < 6; s += 2) {
      expect_training(training, s, 2 * kLayers);
      expect_evaluation(s + 1, kLayers);
    }
    const at::Tensor pending = run_stack(training, rows(7, device).requires_grad_(true));
    {
      const at::NoGradGuard no_grad;
      EXPECT_THROWS(UsageError, "which shares its memory, is still pending", (void)layers[0]({rows(8, device)}));
    }
    pending.mean().backward();
    clear_gradients(*model);
    (void)replays_in(*engine, [] {});  // those outside of steps count in the next one
    expect_evaluation(9, kLayers);
    layers.clear();
  }
}

TEST_F(ForwardOnlyCallableTest, OutputsAreTheCallersOwn) {
  capture();
  const at::NoGradGuard no_grad;
  const at::Tensor first = forward(true, rows(0, device));
  const at::Tensor second = forward(true, rows(1, device));
  EXPECT_TRUE(at::equal(first, forward(false, rows(0, device))));
  EXPECT_TRUE(at::equal(second, forward(false, rows(1, device))));
}

TEST_F(ForwardOnlyCallableTest, ModesAndWeightsAreGuarded) {
  capture();
  model->eval();
  plain->eval();
  expect_evaluation(0, 0);
  capture();
  expect_evaluation(1, kLayers);
  for (const torch::nn::Sequential& stack : {model, plain}) {
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : stack->parameters()) {
      parameter.set_data(parameter.detach() * 2);
    }
  }
  expect_evaluation(2, kLayers);
  for (at::Tensor& parameter : model->parameters()) {
    parameter.requires_grad_(false);
  }
  expect_evaluation(3, kLayers);
}

TEST_F(ForwardOnlyCallableTest, SamplesThatRequireGradientsAndInputsThatDo) {
  const auto body = [](const Tensors& in) { return Tensors{in[0].exp()}; };
  const auto call =
      make_graphed_callables(bare_, {Callable("call", body)}, {{rows(0, device).requires_grad_(true)}}, alone())[0];
  for (const bool requires_grad : {true, false}) {
    const at::NoGradGuard no_grad;
    const at::Tensor x = rows(1, device).requires_grad_(requires_grad);
    at::Tensor y;
    EXPECT_EQ(replays_in(bare_, [&] { y = call({x})[0]; }), 1);
    EXPECT_TRUE(at::equal(y, x.exp()));
    EXPECT_FALSE(y.requires_grad());
  }
}

TEST_F(ForwardOnlyCallableTest, BucketsReplayWithoutGradients) {
  const auto body = [](const Tensors& in) { return Tensors{in[0].exp()}; };
  const auto of = [&](std::int64_t length) { return rows(length, device).narrow(0, 0, length).clone(); };
  const GraphedCallable call =
      make_bucketed_callables(bare_, {Callable("call", body)}, {{{of(4)}}, {{of(8)}}},
                              BucketOptions().graph(alone()).on_unknown_shape(OnUnknownShape::capture))[0];
  const auto expect = [&](std::int64_t length, std::int64_t due) {
    at::Tensor y;
    EXPECT_EQ(replays_in(bare_, [&] { y = call({of(length)})[0]; }), due) << length;
    EXPECT_TRUE(at::equal(y, of(length).exp()));
  };
  {
    const at::NoGradGuard no_grad;
    for (const std::int64_t length : {4, 8, 4}) {
      expect(length, 1);
    }
    expect(6, 0);
    expect(6, 1);
  }
  expect(8, 0);
  const std::string notes = testing::PrintToString(bare_.report().notes);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "ran eagerly once with gradients enabled, although", notes);
  EXPECT_PRED_FORMAT2(testing::IsNotSubstring, "in eval mode", notes);
}

TEST_F(ForwardOnlyCallableTest, OptionsThatMakeNoSense) {
  EXPECT_THROWS(UsageError, "which concern backward", capture(alone().gradients("**", GradientPolicy::accumulated)));
  EXPECT_THROWS(UsageError, "which concern backward", capture(alone().retain_graph_in_backward(true)));
  EXPECT_THROWS(UsageError, "set CallOptions::on_evaluation to capture",
                (void)OffloadEngine(*model, Options(device).graph("*").graph_options(alone())));
  EXPECT_THROWS(
      UsageError, "forward_only or allow_unused_input",
      (void)make_graphed_step(*engine, Callable("step", [](const Tensors& in) { return Tensors{in[0].sum()}; }),
                              {{rows(0, device)}}, StepOptions().graph(alone())));
}

}  // namespace
}  // namespace sidestream::testing_model
