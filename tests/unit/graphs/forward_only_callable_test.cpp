// Callables whose graphs are the forward alone: they replay under no_grad, beside training's or in their memory.
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

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
#include "sidestream/report.h"
#include "sidestream/testing/simulator.h"

namespace sidestream {
namespace {

using testing_model::graph_stack;
using testing_model::layer_stack;
using testing_model::rows;
using testing_model::StepTensors;

class ForwardOnlyCallableTest : public testing::Test {
 protected:
  static constexpr std::int64_t kLayers = 3;

  ~ForwardOnlyCallableTest() override { set_schedule(device_, Schedule()); }

  static GraphOptions alone() { return GraphOptions().forward_only(true); }
  void capture(const GraphOptions& options = alone()) { layers_ = graph_stack(engine_, model_, device_, options); }
  /// Replays of `run`, a step of `engine`.
  static std::int64_t replays_in(OffloadEngine& engine, const std::function<void()>& run) {
    testing_model::in_step(&engine, run);
    return engine.report().replays;
  }
  std::int64_t replays(const std::function<void()>& run) { return replays_in(engine_, run); }
  void expect_evaluation(std::int64_t s, std::int64_t due) {
    at::Tensor y;
    EXPECT_EQ(replays([&] {
                const at::NoGradGuard no_grad;
                y = testing_model::run_stack(layers_, rows(s, device_));
              }),
              due);
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(y.requires_grad());
    EXPECT_TRUE(at::equal(y, plain_->forward(rows(s, device_)))) << "step " << s;
  }
  void expect_training(const std::vector<GraphedCallable>& layers, std::int64_t s, std::int64_t due) {
    const auto step = [&](torch::nn::Sequential& trained, const std::function<at::Tensor(const at::Tensor&)>& run) {
      const at::Tensor x = rows(s, device_).requires_grad_(true);
      StepTensors result = testing_model::train_step(*trained, nullptr, [&] {
        const auto train = [&] { (run(x) * rows(s, device_, 1)).mean().backward(); };
        if (trained.get() == model_.get()) {
          EXPECT_EQ(replays(train), due);
        } else {
          train();
        }
      });
      result.emplace_back("gradient of the input", x.grad());
      return result;
    };
    const StepTensors plain = step(plain_, [&](const at::Tensor& x) { return plain_->forward(x); });
    EXPECT_TRUE(testing_model::same(
        step(model_, [&](const at::Tensor& x) { return testing_model::run_stack(layers, x); }), plain))
        << "step " << s;
  }

  c10::Device device_ = find_device("sim");
  torch::nn::Sequential model_ = layer_stack(kLayers, device_);
  torch::nn::Sequential plain_ = layer_stack(kLayers, device_);
  OffloadEngine engine_{*model_, Options(device_).offload("layers.*.*").min_bytes(1024)};
  OffloadEngine bare_{*model_, Options(device_)};  ///< offloads nothing
  std::vector<GraphedCallable> layers_;
};

TEST_F(ForwardOnlyCallableTest, ReplaysWithoutGradientsAndRunsEagerlyWithThem) {
  capture();
  EXPECT_EQ(engine_.report().captures, kLayers) << "no backward";
  for (std::int64_t s = 0; s < 4; s += 2) {
    expect_evaluation(s, kLayers);
    expect_training(layers_, s + 1, 0);
  }
}

TEST_F(ForwardOnlyCallableTest, OneThatIsForTrainingRunsEagerlyWithoutGradients) {
  capture(GraphOptions());
  expect_evaluation(0, 0);
  expect_training(layers_, 1, 2 * kLayers);
}

TEST_F(ForwardOnlyCallableTest, RunsEagerlyInInferenceMode) {
  capture();
  const c10::InferenceMode inference;
  const at::Tensor y = testing_model::run_stack(layers_, rows(0, device_));
  EXPECT_TRUE(at::equal(y, plain_->forward(rows(0, device_))));
}

TEST_F(ForwardOnlyCallableTest, InTrainingsMemoryItTakesItsInputsAlone) {
  const auto reserved = [&] {
    release_cached_memory(device_);
    return memory_use(device_).reserved;
  };
  for (const char* schedule : {"early", "late", "d2h-late", "seed:1", "seed:2"}) {
    SCOPED_TRACE(schedule);
    set_schedule(device_, Schedule::parse(schedule));
    const auto pool = std::make_shared<GraphPool>(device_);
    const std::vector<GraphedCallable> training = graph_stack(engine_, model_, device_, GraphOptions().pool(pool));
    const std::int64_t before = reserved();
    capture(alone().pool(pool));
    EXPECT_EQ(reserved(), before) << "its input is small";
    for (std::int64_t s = 0; s < 6; s += 2) {
      expect_training(training, s, 2 * kLayers);
      expect_evaluation(s + 1, kLayers);
    }
    const at::Tensor pending = testing_model::run_stack(training, rows(7, device_).requires_grad_(true));
    {
      const at::NoGradGuard no_grad;
      EXPECT_THROWS(UsageError, "which shares its memory, is still pending", (void)layers_[0]({rows(8, device_)}));
    }
    pending.mean().backward();
    testing_model::clear_gradients(*model_);
    (void)replays([] {});  // those outside of steps count in the next one
    expect_evaluation(9, kLayers);
    layers_.clear();
  }
}

TEST_F(ForwardOnlyCallableTest, OutputsAreTheCallersOwn) {
  capture();
  const at::NoGradGuard no_grad;
  const at::Tensor first = testing_model::run_stack(layers_, rows(0, device_));
  const at::Tensor second = testing_model::run_stack(layers_, rows(1, device_));
  EXPECT_TRUE(at::equal(first, plain_->forward(rows(0, device_))));
  EXPECT_TRUE(at::equal(second, plain_->forward(rows(1, device_))));
}

TEST_F(ForwardOnlyCallableTest, ModesAndWeightsAreGuarded) {
  capture();
  model_->eval();
  plain_->eval();
  expect_evaluation(0, 0);
  capture();
  expect_evaluation(1, kLayers);
  for (torch::nn::Sequential& model : {std::ref(model_), std::ref(plain_)}) {
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : model->parameters()) {
      parameter.set_data(parameter.detach() * 2);
    }
  }
  expect_evaluation(2, kLayers);
  for (at::Tensor& parameter : model_->parameters()) {
    parameter.requires_grad_(false);
  }
  expect_evaluation(3, kLayers);
}

TEST_F(ForwardOnlyCallableTest, SamplesThatRequireGradientsAndInputsThatDo) {
  const auto body = [](const Tensors& in) { return Tensors{in[0].exp()}; };
  const auto call =
      make_graphed_callables(bare_, {Callable("call", body)}, {{rows(0, device_).requires_grad_(true)}}, alone())[0];
  for (const bool requires_grad : {true, false}) {
    const at::NoGradGuard no_grad;
    const at::Tensor x = rows(1, device_).requires_grad_(requires_grad);
    at::Tensor y;
    EXPECT_EQ(replays_in(bare_, [&] { y = call({x})[0]; }), 1);
    EXPECT_TRUE(at::equal(y, x.exp()));
    EXPECT_FALSE(y.requires_grad());
  }
}

TEST_F(ForwardOnlyCallableTest, BucketsReplayWithoutGradients) {
  const auto body = [](const Tensors& in) { return Tensors{in[0].exp()}; };
  const auto of = [&](std::int64_t length) { return rows(length, device_).narrow(0, 0, length).clone(); };
  const BucketedCallable call =
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
}

TEST_F(ForwardOnlyCallableTest, OptionsThatMakeNoSense) {
  EXPECT_THROWS(UsageError, "which concern backward", capture(alone().gradients("**", GradientPolicy::accumulated)));
  EXPECT_THROWS(UsageError, "which concern backward", capture(alone().retain_graph_in_backward(true)));
  EXPECT_THROWS(UsageError, "set CallOptions::on_evaluation to capture",
                (void)OffloadEngine(*model_, Options(device_).graph("*").graph_options(alone())));
  EXPECT_THROWS(
      UsageError, "forward_only or allow_unused_input",
      (void)make_graphed_step(engine_, Callable("step", [](const Tensors& in) { return Tensors{in[0].sum()}; }),
                              {{rows(0, device_)}}, StepOptions().graph(alone())));
}

}  // namespace
}  // namespace sidestream
