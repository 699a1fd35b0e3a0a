// Gradients of graphed and offloaded training on a GPU against plain eager training, bit for bit, on deterministic kernels.
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "gpu/gpu_blocks.h"
#include "models/block_model.h"
#include "models/wrapping.h"
#include "sidestream/engine.h"

namespace sidestream::testing_model {
namespace {

class GpuTrainingTest : public gpu::GpuBlocks, public testing::WithParamInterface<Wrapping> {
 protected:
  [[nodiscard]] BlockTraining train_wrapped(std::int64_t check_steps = 0) const {
    return train([&](BlockModel& model) {
      return std::make_unique<OffloadEngine>(model, GetParam().options(device_, 4096).check_steps(check_steps));
    });
  }
};

TEST_P(GpuTrainingTest, GradientsEqualPlainTraining) {
  const BlockTraining plain = train();
  const BlockTraining run = train_wrapped();
  expect_plain(run, plain);
  EXPECT_EQ(run.report.offloaded_bytes > 0, !GetParam().offload.empty());
  EXPECT_EQ(run.report.inline_reloads, 0);
}

TEST_P(GpuTrainingTest, NothingIsUnordered) {
  const Report report = train_wrapped(kSteps).report;
  EXPECT_GT(report.checked_operations, 1000);
  EXPECT_EQ(report.order_findings, std::vector<std::string>());
}

INSTANTIATE_TEST_SUITE_P(Wrapped, GpuTrainingTest,
                         testing::Values(Wrapping{"eager", "", "blocks.*.*"},
                                         Wrapping{"eager_some", "", "blocks.*.core_attn,blocks.*.proj"},
                                         Wrapping{"graphs_1", "blocks.*", "", 1},
                                         Wrapping{"graphs_offload_1", "blocks.*", "blocks.*.*", 1},
                                         Wrapping{"graphs_offload_2", "blocks.*", "blocks.*.*", 2},
                                         Wrapping{"graphs_offload_3", "blocks.*", "blocks.*.*", 3},
                                         Wrapping{"graphs_offload_2_accumulating", "blocks.*", "blocks.*.*", 2, true},
                                         Wrapping{"graphs_offload_4", "blocks.*", "blocks.*.*", 4},
                                         Wrapping{"mixed", "blocks.1,blocks.2,blocks.4", "blocks.*.*", 2},
                                         Wrapping{"mixed_1", "blocks.0,blocks.3", "**", 1}),
                         [](const testing::TestParamInfo<Wrapping>& info) { return info.param.name; });

}  // namespace
}  // namespace sidestream::testing_model
