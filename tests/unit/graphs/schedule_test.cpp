// One recorded training step, run again in every order that streams and events allow, gives the same gradients.
#include <optional>
#include <vector>

#include <gtest/gtest.h>

#include "runtime/sim/recording.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "unit/graphs/block_model.h"
#include "unit/graphs/wrapping.h"
#include "unit/runtime/every_order.h"

namespace sidestream {
namespace {

using sim::raw_bytes;
using testing_model::BlockModel;
using testing_model::Wrapping;

constexpr std::uint64_t kSeeds = 200;

std::vector<at::Tensor> gradient_tensors(const torch::nn::Module& model) {
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& parameter : model.parameters()) {
    tensors.push_back(parameter.grad());
  }
  return tensors;
}

class ScheduleTest : public testing::TestWithParam<Wrapping> {
 protected:
  void SetUp() override { shape_.layers = 5; }

  [[nodiscard]] Options options() const { return GetParam().options(device_, 1024); }

  static void one_step(BlockModel& model, OffloadEngine* engine, const testing_model::Batch& batch) {
    testing_model::clear_gradients(model);
    std::optional<Step> step;
    if (engine != nullptr) {
      step.emplace(engine->step());
    }
    model.loss(batch.tokens, batch.targets).backward();
  }

  sim::OneThread one_thread_;
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
    one_step(plain, nullptr, batch);
    one_step(model, &engine, batch);
    testing_model::descend(plain);
    testing_model::descend(model);
  }
  const auto batch = testing_model::batch_of(shape_, kRecorded, device_);
  one_step(plain, nullptr, batch);
  const std::vector<std::byte> expected = raw_bytes(gradient_tensors(plain));
  sim::Recording recording;
  one_step(model, &engine, batch);
  recording.stop();
  ASSERT_GT(engine.report().offloaded_bytes, 0);
  ASSERT_EQ(raw_bytes(gradient_tensors(model)), expected);

  sim::expect_same_in_every_order(recording, gradient_tensors(model), expected, kSeeds);
}

TEST_P(ScheduleTest, StepsTrainTheSameUnderEveryOnlineSchedule) {
  std::vector<std::vector<at::Tensor>> expected;
  for (const char* name : {"early", "late", "d2h-early", "d2h-late", "seed:1", "seed:2", "seed:3"}) {
    set_schedule(device_, Schedule::parse(name));
    BlockModel model(shape_);
    model.to(device_);
    OffloadEngine engine(model, options());
    for (std::int64_t s = 0; s < 4; ++s) {
      one_step(model, &engine, testing_model::batch_of(shape_, s, device_));
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

INSTANTIATE_TEST_SUITE_P(Wrapped, ScheduleTest,
                         testing::Values(Wrapping{"eager", "", "blocks.*.*"},
                                         Wrapping{"eager_some", "", "blocks.*.core_attn,blocks.*.proj"},
                                         Wrapping{"graphs_1", "blocks.*", "blocks.*.*", 1},
                                         Wrapping{"graphs_2", "blocks.*", "blocks.*.*", 2},
                                         Wrapping{"graphs_3", "blocks.*", "blocks.*.*", 3},
                                         Wrapping{"graphs_2_accumulating", "blocks.*",
                                                  "blocks.*.fc1,blocks.*.core_attn,blocks.*.proj", 2, true},
                                         Wrapping{"mixed", "blocks.1,blocks.2,blocks.4", "**", 2},
                                         Wrapping{"mixed_1", "blocks.0,blocks.3", "**", 1}),
                         [](const testing::TestParamInfo<Wrapping>& info) { return info.param.name; });

}  // namespace
}  // namespace sidestream
