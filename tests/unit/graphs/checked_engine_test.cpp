// The order of all that the engine asks of the device, by the journal of Options::check_steps: no finding.
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "unit/graphs/block_model.h"
#include "unit/graphs/wrapping.h"

namespace sidestream {
namespace {

using testing_model::BlockModel;
using testing_model::Wrapping;

class CheckedEngineTest : public testing::TestWithParam<Wrapping> {
 protected:
  void SetUp() override { shape_.layers = 6; }

  void train(BlockModel& model, OffloadEngine& engine, std::int64_t first, std::int64_t last) const {
    for (std::int64_t s = first; s < last; ++s) {
      const auto batch = testing_model::batch_of(shape_, s, device_);
      testing_model::clear_gradients(model);
      {
        const auto step = engine.step();
        model.loss(batch.tokens, batch.targets).backward();
      }
      testing_model::descend(model);
    }
  }

  c10::Device device_ = find_device("sim");
  BlockModel::Shape shape_;
};

TEST_P(CheckedEngineTest, NothingIsUnordered) {
  BlockModel model(shape_);
  model.to(device_);
  OffloadEngine engine(model, GetParam().options(device_, 1024).check_steps(5));
  train(model, engine, 0, 6);
  const Report report = engine.report();
  EXPECT_GT(report.offloaded_bytes, 0);
  EXPECT_GT(report.checked_operations, 1000);
  EXPECT_EQ(report.order_findings, std::vector<std::string>());
}

INSTANTIATE_TEST_SUITE_P(
    Wrapped, CheckedEngineTest,
    testing::Values(
        Wrapping{"eager", "", "blocks.*.*"}, Wrapping{"eager_some", "", "blocks.*.core_attn,blocks.*.proj"},
        Wrapping{"graphs_1", "blocks.*", "blocks.*.*", 1}, Wrapping{"graphs_2", "blocks.*", "blocks.*.*", 2},
        Wrapping{"graphs_3", "blocks.*", "blocks.*.*", 3}, Wrapping{"graphs_4", "blocks.*", "blocks.*.*", 4},
        Wrapping{"graphs_2_accumulating", "blocks.*", "blocks.*.fc1,blocks.*.core_attn,blocks.*.proj", 2, true},
        Wrapping{"mixed", "blocks.1,blocks.2,blocks.4", "**", 2}, Wrapping{"mixed_1", "blocks.0,blocks.3", "**", 1}),
    [](const testing::TestParamInfo<Wrapping>& info) { return info.param.name; });

}  // namespace
}  // namespace sidestream
