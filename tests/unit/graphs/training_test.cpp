// Training with an engine, against plain training: gradients, buffers and losses bit for bit, whatever is wrapped and in whatever
// order the device works.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "graphs/engine/engine_access.h"
#include "models/block_model.h"
#include "models/body_model.h"
#include "models/wrapping.h"
#include "poisoned_slots.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/testing/simulator.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream::testing_model {
namespace {

class EagerTrainingTest : public testing::Test {
 protected:
  static constexpr std::int64_t kSteps = 5;

  [[nodiscard]] BlockTraining plain() const { return {shape_, device_, kSteps}; }
  [[nodiscard]] BlockTraining train(const Options& options) const {
    return {shape_, device_, kSteps,
            [&](BlockModel& model) { return std::make_unique<OffloadEngine>(model, options); }};
  }

  c10::Device device_ = find_device("sim");
  BlockModel::Shape shape_;
};

TEST_F(EagerTrainingTest, EagerOffloadGivesPlainGradients) {
  const BlockTraining run = train(Options(device_).min_bytes(1024).offload("blocks.*.*"));
  expect_plain(run, plain());
  EXPECT_GT(run.report.offloaded_bytes, 0);
  EXPECT_GT(run.report.reloaded_bytes, 0);
  EXPECT_LE(run.report.reloaded_bytes, run.report.offloaded_bytes)
      << "what had not been let go yet is used where it is";
  EXPECT_EQ(run.report.inline_reloads, 0);
  EXPECT_LT(run.report.step_peak_bytes, run.report.sizing_peak_bytes);
  EXPECT_EQ(run.report.pinned_allocations_after_planning, 0);
}

class GraphedTrainingTest : public EagerTrainingTest, public testing::WithParamInterface<std::int64_t> {
 protected:
  [[nodiscard]] Options graphed(const GraphOptions& options = {}) const {
    return Options(device_)
        .min_bytes(1024)
        .graph("blocks.*")
        .graph_options(GraphOptions(options).side_streams(GetParam()));
  }
};

TEST_P(GraphedTrainingTest, GraphsGivePlainGradients) {
  const BlockTraining run = train(graphed());
  expect_plain(run, plain());
  EXPECT_EQ(run.report.captures, 2 * shape_.layers);
  EXPECT_EQ(run.report.replays, 2 * shape_.layers);
  EXPECT_EQ(run.report.eager_calls, shape_.layers) << "the sizing pass and nothing else";
}

TEST_P(GraphedTrainingTest, GraphsWithOffloadGivePlainGradients) {
  shape_.layers = 6;
  const BlockTraining run = train(graphed().offload("blocks.*.*"));
  expect_plain(run, plain());
  EXPECT_GT(run.report.offloaded_bytes, 0);
  EXPECT_EQ(run.report.offloaded_bytes, run.report.reloaded_bytes);
  EXPECT_EQ(run.report.inline_reloads, 0);
}

TEST_P(GraphedTrainingTest, DropoutDrawsAsInPlainTraining) {
  shape_.dropout = 0.3;
  expect_plain(train(graphed().offload("blocks.*.core_attn")), plain());
}

TEST_P(GraphedTrainingTest, AccumulationInGraphsGivesPlainGradients) {
  expect_plain(train(graphed(GraphOptions().gradients("**", GradientPolicy::accumulated)).offload("blocks.*.fc1")),
               plain());
}

INSTANTIATE_TEST_SUITE_P(SideStreams, GraphedTrainingTest, testing::Values(1, 2, 3, 4));

TEST(DrawingBodiesTest, DrawsWhoseNumberDependsOnDataAreAsInPlainTraining) {
  const c10::Device device = find_device("sim");
  const auto squashed = [](BodyBlock& block, const at::Tensor& x) { return at::matmul(x, block.weight).tanh(); };
  // Each body draws where the draws of the body before it end.
  const std::vector<BodyBlock::Body> bodies{
      [=](BodyBlock& block, const at::Tensor& x) {
        const at::Tensor y = squashed(block, x);
        return y * at::poisson(y.detach().abs() * 3);
      },
      [=](BodyBlock& block, const at::Tensor& x) { return at::rrelu(squashed(block, x), 0.1, 0.3, true); },
      [=](BodyBlock& block, const at::Tensor& x) {
        const at::Tensor y = squashed(block, x);
        return y * at::_standard_gamma(y.detach().abs() + 0.1);
      },
      [=](BodyBlock& block, const at::Tensor& x) {
        const at::Tensor y = squashed(block, x);
        return y + at::binomial(at::full_like(y, 5), y.detach().sigmoid());
      },
      [=](BodyBlock& block, const at::Tensor& x) { return at::dropout(squashed(block, x), 0.5, true); }};
  for (const char* schedule : {"early", "late", "seed:1"}) {
    SCOPED_TRACE(schedule);
    set_schedule(device, Schedule::parse(schedule));
    BodyTwins twins(device, bodies);
    OffloadEngine engine(twins.mine, Options(device).graph("blocks.*").min_bytes(256).offload("**").verify_replays(2));
    twins.expect_plain(engine, 0, 6);
    EXPECT_GT(engine.report().replays, 0);
    EXPECT_GT(engine.report().verified_backwards, 0);
  }
  set_schedule(device, Schedule());
}

class WrappedTrainingTest : public testing::TestWithParam<Wrapping> {
 protected:
  /// The engine's runtime is `runtime`, or one of its own where that is null.
  [[nodiscard]] BlockTraining train(std::int64_t steps, std::int64_t check_steps = 0,
                                    const std::shared_ptr<Runtime>& runtime = nullptr) const {
    const Options options = GetParam().options(device_, 1024).check_steps(check_steps);
    return {shape_, device_, steps, [&](BlockModel& model) {
              return runtime == nullptr
                         ? std::make_unique<OffloadEngine>(model, options)
                         : std::make_unique<OffloadEngine>(EngineAccess::engine(model, options, runtime));
            }};
  }

  c10::Device device_ = find_device("sim");
  BlockModel::Shape shape_{.layers = 5};
};

TEST_P(WrappedTrainingTest, IsPlainTrainingUnderEveryOnlineSchedule) {
  const sim::OneThread one_thread;
  const BlockTraining plain(shape_, device_, 4);
  for (const char* name : {"early", "late", "d2h-early", "d2h-late", "seed:1", "seed:2", "seed:3"}) {
    SCOPED_TRACE(name);
    set_schedule(device_, Schedule::parse(name));
    expect_plain(train(4), plain);
  }
  set_schedule(device_, Schedule());
}

TEST_P(WrappedTrainingTest, ReadsNoHostSlotThatMayNotBeRead) {
  shape_.layers = 6;
  const auto poisoned = std::make_shared<PoisonedSlots>(make_runtime(device_));
  const BlockTraining run = train(4, 0, poisoned);
  expect_plain(run, BlockTraining(shape_, device_, 4));
  EXPECT_GT(poisoned->count(), 20);
}

TEST_P(WrappedTrainingTest, IsOrdered) {
  shape_.layers = 6;
  const Report report = train(6, 5).report;
  EXPECT_GT(report.offloaded_bytes, 0);
  EXPECT_GT(report.checked_operations, 1000);
  EXPECT_EQ(report.order_findings, std::vector<std::string>());
}

std::string name_of_wrapping(const testing::TestParamInfo<Wrapping>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Wrapped, WrappedTrainingTest, testing::ValuesIn(wrappings()), name_of_wrapping);
INSTANTIATE_TEST_SUITE_P(AllGroups, WrappedTrainingTest,
                         testing::Values(Wrapping{"graphs_accumulating", "blocks.*", "blocks.*.*", 2, true}),
                         name_of_wrapping);

}  // namespace
}  // namespace sidestream::testing_model
