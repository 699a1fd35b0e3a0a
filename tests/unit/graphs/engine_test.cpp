#include "sidestream/engine.h"

#include <gtest/gtest.h>
#include <torch/utils.h>

#include "sidestream/device.h"
#include "sidestream/error.h"
#include "unit/graphs/block_model.h"

namespace sidestream {
namespace {

using testing_model::BlockModel;

/// Gradients of every step and the losses.
struct TrainingRun {
  std::vector<std::vector<at::Tensor>> gradients;
  std::vector<double> losses;
  Report report;
};

constexpr std::int64_t kSteps = 5;

Options options_for(c10::Device device) { return Options(device).min_bytes(1024); }

/// Trains a new model for a few steps, with an engine when `options` is set.
TrainingRun train(const BlockModel::Shape& shape, c10::Device device, const Options* options) {
  BlockModel model(shape);
  model.to(device);
  torch::manual_seed(5);
  std::unique_ptr<OffloadEngine> engine;
  if (options != nullptr) {
    engine = std::make_unique<OffloadEngine>(model, *options);
  }
  TrainingRun run;
  for (std::int64_t s = 0; s < kSteps; ++s) {
    const auto batch = testing_model::batch_of(shape, s, device);
    testing_model::clear_gradients(model);
    {
      std::optional<Step> step;
      if (engine != nullptr) {
        step.emplace(engine->step());
      }
      const at::Tensor loss = model.loss(batch.tokens, batch.targets);
      loss.backward();
      run.losses.push_back(loss.item<double>());
    }
    run.gradients.push_back(testing_model::gradients(model));
    testing_model::descend(model);
  }
  if (engine != nullptr) {
    run.report = engine->report();
  }
  return run;
}

void expect_same(const TrainingRun& run, const TrainingRun& plain) {
  ASSERT_EQ(run.gradients.size(), plain.gradients.size());
  for (std::size_t s = 0; s < plain.gradients.size(); ++s) {
    EXPECT_TRUE(testing_model::same(run.gradients[s], plain.gradients[s])) << "step " << s;
    EXPECT_EQ(run.losses[s], plain.losses[s]) << "step " << s;
  }
}

class EngineTest : public testing::Test {
 protected:
  c10::Device device_ = find_device("sim");
  BlockModel::Shape shape_;
};

TEST_F(EngineTest, EagerOffloadGivesPlainGradients) {
  const TrainingRun plain = train(shape_, device_, nullptr);
  const Options options = options_for(device_).offload("blocks.*.*");
  const TrainingRun run = train(shape_, device_, &options);
  expect_same(run, plain);
  EXPECT_GT(run.report.offloaded_bytes, 0);
  EXPECT_GT(run.report.reloaded_bytes, 0);
  EXPECT_LE(run.report.reloaded_bytes, run.report.offloaded_bytes)
      << "what had not been let go yet is used where it is";
  EXPECT_EQ(run.report.inline_reloads, 0);
  EXPECT_LT(run.report.step_peak_bytes, run.report.sizing_peak_bytes);
  EXPECT_EQ(run.report.pinned_allocations_after_planning, 0);
}

class GraphedEngineTest : public EngineTest, public testing::WithParamInterface<std::int64_t> {};

TEST_P(GraphedEngineTest, GraphsGivePlainGradients) {
  const TrainingRun plain = train(shape_, device_, nullptr);
  const Options options = options_for(device_).graph("blocks.*").graph_options(GraphOptions().side_streams(GetParam()));
  const TrainingRun run = train(shape_, device_, &options);
  expect_same(run, plain);
  EXPECT_EQ(run.report.captures, 2 * shape_.layers);
  EXPECT_EQ(run.report.replays, 2 * shape_.layers);
  EXPECT_EQ(run.report.eager_calls, shape_.layers) << "the sizing pass and nothing else";
}

TEST_P(GraphedEngineTest, GraphsWithOffloadGivePlainGradients) {
  shape_.layers = 6;
  const TrainingRun plain = train(shape_, device_, nullptr);
  const Options options = options_for(device_)
                              .graph("blocks.*")
                              .offload("blocks.*.*")
                              .graph_options(GraphOptions().side_streams(GetParam()));
  const TrainingRun run = train(shape_, device_, &options);
  expect_same(run, plain);
  EXPECT_GT(run.report.offloaded_bytes, 0);
  EXPECT_EQ(run.report.offloaded_bytes, run.report.reloaded_bytes);
  EXPECT_EQ(run.report.inline_reloads, 0);
}

TEST_P(GraphedEngineTest, DropoutDrawsAsInPlainTraining) {
  shape_.dropout = 0.3;
  const TrainingRun plain = train(shape_, device_, nullptr);
  const Options options = options_for(device_)
                              .graph("blocks.*")
                              .offload("blocks.*.core_attn")
                              .graph_options(GraphOptions().side_streams(GetParam()));
  expect_same(train(shape_, device_, &options), plain);
}

TEST_P(GraphedEngineTest, AccumulationInGraphsGivesPlainGradients) {
  const TrainingRun plain = train(shape_, device_, nullptr);
  const Options options = options_for(device_)
                              .graph("blocks.*")
                              .offload("blocks.*.fc1")
                              .graph_options(GraphOptions().side_streams(GetParam()).accumulate_in_graph(true));
  expect_same(train(shape_, device_, &options), plain);
}

INSTANTIATE_TEST_SUITE_P(SideStreams, GraphedEngineTest, testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace sidestream
