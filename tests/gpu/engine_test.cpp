// Gradients of graphed and offloaded training on a GPU against plain eager training, bit for bit, on deterministic kernels.
#include <string>
#include <vector>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include "gpu/gpu_fixture.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "unit/graphs/block_model.h"
#include "unit/graphs/wrapping.h"

namespace sidestream {
namespace {

using testing_model::BlockModel;
using testing_model::Wrapping;

class GpuEngineTest : public gpu::Gpu, public testing::WithParamInterface<Wrapping> {
 protected:
  void SetUp() override {
    gpu::Gpu::SetUp();
    if (IsSkipped()) {
      return;
    }
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
    at::globalContext().setDeterministicFillUninitializedMemory(false);
    shape_.layers = 6;
    shape_.hidden = 256;
    shape_.heads = 4;
    shape_.sequence = 128;
    shape_.batch = 4;
  }
  void TearDown() override { at::globalContext().setDeterministicAlgorithms(false, false); }

  std::vector<std::vector<at::Tensor>> train(const Options* options) {
    const c10::Device device(c10::DeviceType::CUDA, 0);
    BlockModel model(shape_);
    model.to(device);
    std::unique_ptr<OffloadEngine> engine;
    if (options != nullptr) {
      engine = std::make_unique<OffloadEngine>(model, *options);
    }
    std::vector<std::vector<at::Tensor>> gradients;
    for (std::int64_t s = 0; s < 6; ++s) {
      const auto batch = testing_model::batch_of(shape_, s, device);
      testing_model::clear_gradients(model);
      {
        std::optional<Step> step;
        if (engine != nullptr) {
          step.emplace(engine->step());
        }
        model.loss(batch.tokens, batch.targets).backward();
      }
      gradients.push_back(testing_model::gradients(model));
      testing_model::descend(model);
    }
    if (engine != nullptr) {
      report_ = engine->report();
    }
    return gradients;
  }

  BlockModel::Shape shape_;
  Report report_;
};

TEST_P(GpuEngineTest, GradientsEqualPlainTraining) {
  const auto plain = train(nullptr);
  const Options options = GetParam().options(c10::Device(c10::DeviceType::CUDA, 0), 4096);
  const auto run = train(&options);
  for (std::size_t s = 0; s < plain.size(); ++s) {
    EXPECT_TRUE(testing_model::same(run[s], plain[s])) << "step " << s;
  }
  EXPECT_EQ(report_.offloaded_bytes > 0, !GetParam().offload.empty());
  EXPECT_EQ(report_.inline_reloads, 0);
}

TEST_P(GpuEngineTest, NothingIsUnordered) {
  const Options options = GetParam().options(c10::Device(c10::DeviceType::CUDA, 0), 4096).check_steps(6);
  (void)train(&options);
  EXPECT_GT(report_.checked_operations, 1000);
  EXPECT_EQ(report_.order_findings, std::vector<std::string>());
}

INSTANTIATE_TEST_SUITE_P(Wrapped, GpuEngineTest,
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
}  // namespace sidestream
