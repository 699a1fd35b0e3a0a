// One recorded training step, run again in every order that streams and events allow, gives the same gradients.
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <c10/core/AutogradState.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include "runtime/sim/recording.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "unit/graphs/block_model.h"

namespace sidestream {
namespace {

using testing_model::BlockModel;

constexpr std::int64_t kSeeds = 200;

/// How the step is wrapped.
struct Case {
  std::string name;
  std::string graph;
  std::string offload;
  std::int64_t side_streams = 2;
  bool accumulate = false;
};

void PrintTo(const Case& value, std::ostream* out) { *out << value.name; }

class ScheduleTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    // Autograd's device thread frees tensors after backward has returned; orders must reproduce.
    c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
    shape_.layers = 5;
  }
  void TearDown() override { c10::AutogradState::get_tls_state().set_multithreading_enabled(true); }

  /// Gradients as they lie in device memory, waiting for nothing.
  static std::vector<std::byte> raw_gradients(const torch::nn::Module& model) {
    std::vector<std::byte> bytes;
    for (const at::Tensor& parameter : model.parameters()) {
      const auto* data = static_cast<const std::byte*>(parameter.grad().const_data_ptr());
      bytes.insert(bytes.end(), data, data + parameter.grad().nbytes());
    }
    return bytes;
  }

  Options options() const {
    Options options(device_);
    options.min_bytes(1024)
        .offload(GetParam().offload)
        .graph_options(GraphOptions().side_streams(GetParam().side_streams).accumulate_in_graph(GetParam().accumulate));
    if (!GetParam().graph.empty()) {
      options.graph(GetParam().graph);
    }
    return options;
  }

  void one_step(BlockModel& model, OffloadEngine* engine, std::int64_t index, const testing_model::Batch& batch) {
    (void)index;
    testing_model::clear_gradients(model);
    std::optional<Step> step;
    if (engine != nullptr) {
      step.emplace(engine->step());
    }
    model.loss(batch.tokens, batch.targets).backward();
  }

  c10::Device device_ = find_device("sim");
  BlockModel::Shape shape_;
};

TEST_P(ScheduleTest, EveryOrderGivesTheGradientsOfPlainTraining) {
  constexpr std::int64_t kRecorded = 3;
  BlockModel plain(shape_);
  plain.to(device_);
  BlockModel model(shape_);
  model.to(device_);
  OffloadEngine engine(model, options());
  for (std::int64_t s = 0; s < kRecorded; ++s) {
    const auto batch = testing_model::batch_of(shape_, s, device_);
    one_step(plain, nullptr, s, batch);
    one_step(model, &engine, s, batch);
    testing_model::descend(plain);
    testing_model::descend(model);
  }
  const auto batch = testing_model::batch_of(shape_, kRecorded, device_);
  one_step(plain, nullptr, kRecorded, batch);
  const std::vector<std::byte> expected = raw_gradients(plain);
  sim::Recording recording;
  one_step(model, &engine, kRecorded, batch);
  recording.stop();
  ASSERT_GT(engine.report().offloaded_bytes, 0);
  ASSERT_EQ(raw_gradients(model), expected);

  const auto expect_same = [&](const Schedule& schedule) {
    recording.rerun(schedule);
    EXPECT_EQ(raw_gradients(model) == expected, true) << schedule.name();
  };
  for (const char* name : {"early", "late", "d2h-early", "d2h-late"}) {
    expect_same(Schedule::parse(name));
  }
  for (std::int64_t seed = 0; seed < kSeeds && !HasFailure(); ++seed) {
    expect_same(Schedule(Schedule::Kind::seed, static_cast<std::uint64_t>(seed)));
  }
}

TEST_P(ScheduleTest, StepsTrainTheSameUnderEveryOnlineSchedule) {
  std::vector<std::vector<at::Tensor>> expected;
  for (const char* name : {"early", "late", "d2h-early", "d2h-late", "seed:1", "seed:2", "seed:3"}) {
    set_schedule(device_, Schedule::parse(name));
    BlockModel model(shape_);
    model.to(device_);
    OffloadEngine engine(model, options());
    for (std::int64_t s = 0; s < 4; ++s) {
      one_step(model, &engine, s, testing_model::batch_of(shape_, s, device_));
      const std::vector<at::Tensor> now = testing_model::gradients(model);
      if (expected.size() <= static_cast<std::size_t>(s)) {
        expected.push_back(now);
      }
      EXPECT_TRUE(testing_model::same(now, expected[s])) << name << ", step " << s;
      testing_model::descend(model);
    }
  }
  set_schedule(device_, Schedule());
}

INSTANTIATE_TEST_SUITE_P(
    Wrapped, ScheduleTest,
    testing::Values(Case{"eager", "", "blocks.*.*"}, Case{"eager_some", "", "blocks.*.core_attn,blocks.*.proj"},
                    Case{"graphs_1", "blocks.*", "blocks.*.*", 1}, Case{"graphs_2", "blocks.*", "blocks.*.*", 2},
                    Case{"graphs_3", "blocks.*", "blocks.*.*", 3},
                    Case{"graphs_2_accumulating", "blocks.*", "blocks.*.fc1,blocks.*.core_attn,blocks.*.proj", 2, true},
                    Case{"mixed", "blocks.1,blocks.2,blocks.4", "**", 2},
                    Case{"mixed_1", "blocks.0,blocks.3", "**", 1}),
    [](const testing::TestParamInfo<Case>& info) { return info.param.name; });

}  // namespace
}  // namespace sidestream
