// Ranks that agree to capture: GraphOptions::agree_to_capture.
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/any.h>
#include <torch/utils.h>

#include "call_fixture.h"
#include "expect_throws.h"
#include "models/layer_stack.h"
#include "sidestream/bucketed_callables.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"

namespace sidestream::testing_model {
namespace {

class AgreementTest : public CallTest {
 protected:
  [[nodiscard]] std::unique_ptr<OffloadEngine> engine(const std::function<bool(bool)>& agree) {
    return std::make_unique<OffloadEngine>(model_, options(GraphOptions().num_warmup_iters(1).agree_to_capture(agree)));
  }
};

TEST_F(AgreementTest, IsAskedByEachStepAfterTheFirstAndHeeded) {
  std::vector<bool> asked;
  bool all = false;
  const auto engine = this->engine([&](bool mine) {
    asked.push_back(mine);
    return mine && all;
  });
  expect_plain(*engine, 0, 3);
  EXPECT_EQ(asked, (std::vector<bool>{true, true}));
  EXPECT_EQ(engine->report().captures, 0) << "another rank is not ready";
  EXPECT_EQ(engine->report().eager_calls, 3 * 4);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "because GraphOptions::agree_to_capture returned false",
                      testing::PrintToString(engine->report().notes));
  EXPECT_PRED_FORMAT2(testing::IsNotSubstring, "match no capture", testing::PrintToString(engine->report().notes));
  all = true;
  expect_plain(*engine, 3, 5);
  EXPECT_EQ(asked, (std::vector<bool>{true, true, true, false}));
  EXPECT_EQ(engine->report().captures, 8);
  EXPECT_EQ(engine->report().replays, 8);
}

TEST_F(AgreementTest, WeightsThatWereRelocatedRunEagerlyUntilAllRanksCapture) {
  bool all = true;
  const auto engine = this->engine([&](bool mine) { return mine && all; });
  expect_plain(*engine, 0, 3);
  relocate(model_);
  all = false;
  expect_plain(*engine, 3, 5);
  EXPECT_EQ(engine->report().captures, 8);
  all = true;
  expect_plain(*engine, 5, 7);
  EXPECT_EQ(engine->report().captures, 16);
}

TEST_F(AgreementTest, ACallbackThatThrowsEndsTheStepAndNothingElse) {
  bool fails = true;
  const auto engine = this->engine([&](bool mine) {
    if (fails) {
      throw std::runtime_error("a rank is gone");
    }
    return mine;
  });
  expect_plain(*engine, 0, 1);
  EXPECT_THROWS(std::runtime_error, "a rank is gone", (void)engine->step());
  fails = false;
  expect_plain(*engine, 1, 4);
  EXPECT_EQ(engine->report().captures, 8);
}

TEST_F(AgreementTest, ABucketedCallThatIsNotCapturedAgainSaysWhy) {
  const auto made = [this] {
    torch::manual_seed(3);
    auto layer = std::make_shared<Mlp>(kHidden, Mlp::Extras{});
    layer->to(device_);
    return layer;
  };
  const auto layer = made();
  const auto plain = made();
  OffloadEngine engine(*layer, Options(device_));
  bool all = true;
  const GraphOptions graph = GraphOptions()
                                 .agree_to_capture([&](bool mine) { return mine && all; })
                                 .on_relocated_weights(OnRelocatedWeights::capture);
  const GraphedCallable call =
      make_bucketed_callables(engine, {Callable("layer", torch::nn::AnyModule(layer))},
                              {{{rows(0, device_).requires_grad_(true)}}}, BucketOptions().graph(graph))[0];
  const auto expect_replays = [&](std::int64_t s, std::int64_t replays) {
    expect_same_step(*layer, &engine, *plain, s, [&](Mlp& module) {
      const at::Tensor x = rows(s, device_).requires_grad_(true);
      const at::Tensor y = &module == layer.get() ? call({x})[0] : module.forward(x);
      y.mean().backward();
    });
    EXPECT_EQ(engine.report().replays, replays) << s;
  };
  expect_replays(0, 2);
  relocate(*layer);
  all = false;
  expect_replays(1, 0);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "ran eagerly once because GraphOptions::agree_to_capture",
                      testing::PrintToString(engine.report().notes));
  EXPECT_EQ(engine.report().eager_calls, 1);
  all = true;
  expect_replays(2, 2);
}

TEST_F(AgreementTest, GraphedCallablesAreNotMadeWithoutIt) {
  OffloadEngine engine(model_, Options(device_).offload("**").min_bytes(1024));
  const Callable half("half", [](const Tensors& x) { return Tensors{x[0] * 0.5}; });
  const at::Tensor sample = at::ones({4}, at::TensorOptions().device(device_)).requires_grad_(true);
  bool all = false;
  const GraphOptions options = GraphOptions().agree_to_capture([&](bool mine) { return mine && all; });
  EXPECT_THROWS(UsageError, "GraphOptions::agree_to_capture returned false",
                (void)make_graphed_callables(engine, {half}, {{Sample(sample)}}, options));
  all = true;
  EXPECT_EQ(make_graphed_callables(engine, {half}, {{Sample(sample)}}, options).size(), 1U);
}

}  // namespace
}  // namespace sidestream::testing_model
