// What the engine asks of the sim device, and that nothing of it reads a host slot that may not be read.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "engine_operations.h"
#include "graphs/engine/engine_access.h"
#include "poisoned_slots.h"
#include "sidestream/device.h"
#include "unit/graphs/block_model.h"
#include "unit/graphs/wrapping.h"

namespace sidestream {
namespace {

using testing_model::BlockModel;
using testing_model::PoisonedSlots;
using testing_model::Wrapping;

class EngineOperationsTest : public testing::TestWithParam<std::int64_t> {};

// On CUDA the same list holds (tests/gpu): the two backends are asked for the same, in the same order.
TEST_P(EngineOperationsTest, AreTheSameOnEveryBackend) {
  EXPECT_EQ(testing_model::engine_operations(find_device("sim"), GetParam()),
            testing_model::expected_engine_operations(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(SideStreams, EngineOperationsTest, testing::Values(0, 1, 2, 3),
                         [](const testing::TestParamInfo<std::int64_t>& info) {
                           return info.param == 0 ? std::string("eager") : "graphs_" + std::to_string(info.param);
                         });

class PoisonedSlotsTest : public testing::TestWithParam<Wrapping> {
 protected:
  std::vector<std::vector<at::Tensor>> train(const std::shared_ptr<Runtime>& runtime) const {
    BlockModel model(BlockModel::Shape{});
    model.to(device_);
    std::optional<OffloadEngine> engine;
    if (runtime != nullptr) {
      engine.emplace(EngineAccess::engine(model, GetParam().options(device_, 1024), runtime));
    }
    std::vector<std::vector<at::Tensor>> gradients;
    for (std::int64_t s = 0; s < 4; ++s) {
      const auto batch = testing_model::batch_of(BlockModel::Shape{}, s, device_);
      testing_model::clear_gradients(model);
      if (engine) {
        const auto step = engine->step();
        model.loss(batch.tokens, batch.targets).backward();
      } else {
        model.loss(batch.tokens, batch.targets).backward();
      }
      gradients.push_back(testing_model::gradients(model));
      testing_model::descend(model);
    }
    return gradients;
  }

  c10::Device device_ = find_device("sim");
};

TEST_P(PoisonedSlotsTest, GradientsEqualPlainTraining) {
  const auto plain = train(nullptr);
  const auto poisoned = std::make_shared<PoisonedSlots>(make_runtime(device_));
  const auto run = train(poisoned);
  for (std::size_t s = 0; s < plain.size(); ++s) {
    EXPECT_TRUE(testing_model::same(run[s], plain[s])) << "step " << s;
  }
  EXPECT_GT(poisoned->count(), 20);
}

INSTANTIATE_TEST_SUITE_P(Wrapped, PoisonedSlotsTest,
                         testing::Values(Wrapping{"eager", "", "blocks.*.*"},
                                         Wrapping{"graphs_1", "blocks.*", "blocks.*.*", 1},
                                         Wrapping{"graphs_2_accumulating", "blocks.*", "blocks.*.*", 2, true},
                                         Wrapping{"mixed", "blocks.1,blocks.2", "**", 1}),
                         [](const testing::TestParamInfo<Wrapping>& info) { return info.param.name; });

}  // namespace
}  // namespace sidestream
