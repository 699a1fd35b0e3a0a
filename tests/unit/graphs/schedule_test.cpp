// Steps that run under each online schedule give the same gradients.
#include <optional>
#include <vector>

#include <gtest/gtest.h>

#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/testing/simulator.h"
#include "unit/graphs/block_model.h"
#include "unit/graphs/wrapping.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream {
namespace {

using testing_model::BlockModel;
using testing_model::Wrapping;

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
