// A step with an order that says when weight gradients are computed.
#include <algorithm>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "expect_throws.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/pipeline_order.h"
#include "unit/graphs/captured_order_fixture.h"

namespace sidestream::testing_model {
namespace {

using Kind = PipelineStep::Kind;

/// Zero-bubble: weight gradients are steps of the order.
class DelayedOrderTest : public CapturedOrderTest {
 protected:
  DelayedOrderTest() {
    PipelineShape shape{4, 1, kMicrobatches};
    shape.delay_weight_gradients = true;
    order_ = pipeline_order(shape, 1);
    graphs_of_call_ = 3;
  }
  [[nodiscard]] Options options() const {
    return CapturedOrderTest::options()
        .call_options(CallOptions().max_captures(64))
        .graph_options(GraphOptions().gradients("**", GradientPolicy::delayed));
  }
  /// A step that runs `runs` instead of its order.
  void run_step(OffloadEngine& engine, const std::vector<PipelineStep>& runs) {
    Step step = engine.step(order_);
    (void)run(model_, &engine, runs, 3);
    step.finish();
  }
  /// The order with the weight gradients of all microbatches at its end.
  [[nodiscard]] std::vector<PipelineStep> weights_last() const {
    std::vector<PipelineStep> last = order_;
    std::stable_partition(last.begin(), last.end(),
                          [](const PipelineStep& work) { return work.kind != Kind::weight_gradients; });
    return last;
  }
  /// The order without them.
  [[nodiscard]] std::vector<PipelineStep> without_weights() const {
    std::vector<PipelineStep> without = order_;
    std::erase_if(without, [](const PipelineStep& work) { return work.kind == Kind::weight_gradients; });
    return without;
  }
};

TEST_F(DelayedOrderTest, HasPlainGradients) {
  OffloadEngine engine(model_, options());
  expect_plain_steps(engine, 0, 2);
  expect_all_replay(engine, 2);
  const Report report = step_of(engine, 3);
  EXPECT_EQ(report.captures, 2 * kLayers * kMicrobatches) << "forwards and backwards";
  EXPECT_GT(report.offloaded_bytes, 0);
}

TEST_F(DelayedOrderTest, TheirTensorsAreReloadedWhileTheThirdGraphBeforeRuns) {
  for (const std::int64_t rank : {0, 1, 2, 3}) {
    PipelineShape shape{4, 1, kMicrobatches};
    shape.delay_weight_gradients = true;
    order_ = pipeline_order(shape, rank);
    OffloadEngine engine(model_, options());
    expect_plain_steps(engine, 0, 3);
    const Report report = step_of(engine, 3);
    EXPECT_GT(report.offloaded_bytes, 0) << "rank " << rank;
    EXPECT_EQ(report.inline_reloads, 0) << "rank " << rank;
  }
}

TEST_F(DelayedOrderTest, WeightGradientsWhileTheNextMicrobatchIsNotOffloadedYet) {
  const std::int64_t stage = order_.front().stage;
  order_.clear();
  for (const auto& [microbatch, kind] : std::vector<std::pair<std::int64_t, Kind>>{{0, Kind::forward},
                                                                                   {0, Kind::backward},
                                                                                   {1, Kind::forward},
                                                                                   {0, Kind::weight_gradients},
                                                                                   {2, Kind::forward},
                                                                                   {1, Kind::backward},
                                                                                   {1, Kind::weight_gradients},
                                                                                   {2, Kind::backward},
                                                                                   {2, Kind::weight_gradients}}) {
    order_.push_back({stage, microbatch, kind});
  }
  OffloadEngine engine(model_, options().lag(120'000));  // what some six calls save
  expect_plain_steps(engine, 0, 4);
  EXPECT_GT(engine.report().offloaded_bytes, 0);
}

TEST_F(DelayedOrderTest, IsKeptWhenWeightsWereRelocated) {
  OffloadEngine engine(model_, options());
  expect_plain_steps(engine, 0, 3);
  relocate(model_);
  relocate(plain_);
  expect_plain_steps(engine, 3, 4);
  expect_all_replay(engine, 4);
}

TEST_F(DelayedOrderTest, ItsReplaysAreVerified) {
  OffloadEngine engine(model_, options().verify_replays(1));
  expect_plain_steps(engine, 0, 4);
  EXPECT_GT(engine.report().verified_backwards, 0);
}

TEST_F(DelayedOrderTest, AnOrderWithLaterWeightGradientsHasCapturesOfItsOwn) {
  OffloadEngine engine(model_, options());
  expect_plain_steps(engine, 0, 3);
  order_ = weights_last();
  run_step(engine,
           order_);  // some calls run eagerly, and gradients of parameters are added in another order than plainly
  clear_gradients(model_);
  expect_plain_steps(engine, 4, 5);
  expect_all_replay(engine, 5);
}

TEST_F(DelayedOrderTest, IfTheOrderDoesNotSayWhenTheyAreComputedAtAnyTime) {
  OffloadEngine engine(model_, options());
  const std::vector<PipelineStep> told = without_weights();
  for (std::int64_t s = 0; s < 3; ++s) {
    expect_plain_step(engine, s, order_, &told);
  }
  expect_plain_step(engine, 3, weights_last(), &told);
  const Report before = engine.report();
  expect_plain_step(engine, 4, order_, &told);
  EXPECT_EQ(engine.report().eager_calls, before.eager_calls);
  EXPECT_EQ(engine.report().replays, graphs_of_call_ * kLayers * kMicrobatches);
}

TEST_F(DelayedOrderTest, ABackwardThatWouldOverwriteWhatTheyAreComputedFromIsRefused) {
  OffloadEngine engine(model_, options());
  expect_plain_steps(engine, 0, 3);
  EXPECT_THROWS(UsageError, "its backward would overwrite what the delayed weight gradients of graphed call \"layers.",
                run_step(engine, without_weights()));
  clear_gradients(model_);
  expect_plain_steps(engine, 4, 6);
  expect_all_replay(engine, 6);
}

TEST_F(DelayedOrderTest, TwiceAndNeverAreRefused) {
  OffloadEngine engine(model_, options());
  expect_plain_steps(engine, 0, 3);
  const auto last = std::prev(order_.end());
  ASSERT_EQ(last->kind, Kind::weight_gradients);
  const std::vector<PipelineStep> never(order_.begin(), last);
  std::vector<PipelineStep> twice = order_;
  twice.push_back(*last);
  EXPECT_THROWS(UsageError, "are delayed and were not computed", run_step(engine, never));
  EXPECT_THROWS(UsageError, "are computed already", run_step(engine, twice));
  clear_gradients(model_);
  expect_plain_steps(engine, 5, 7);
  expect_all_replay(engine, 7);
}

}  // namespace
}  // namespace sidestream::testing_model
