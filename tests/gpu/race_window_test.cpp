// Training on a GPU whose streams are held up before their work of one kind, and whose free memory is overwritten: gradients of
// plain training, bit for bit, on deterministic kernels, with new data in each step; and nothing unordered.
#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "gpu/gpu_blocks.h"
#include "gpu/poisoned_memory.h"
#include "gpu/spinning_runtime.h"
#include "graphs/engine/engine_access.h"
#include "models/block_model.h"
#include "models/wrapping.h"
#include "poisoned_slots.h"
#include "sidestream/engine.h"

namespace sidestream::testing_model {
namespace {

/// What is held up, and whether memory that is not in use is overwritten.
struct Window {
  std::string name;
  gpu::Spins spins;
  bool poison = false;
};

void PrintTo(const Window& value, std::ostream* out) { *out << value.name; }

// A copy of this model takes some 10 us, an operator as much; a spin of 200,000 cycles about 100 us.
constexpr gpu::Spins kAll{.to_host = 200'000, .to_device = 200'000, .compute = 20'000, .launch = 200'000};

class RaceWindowTest : public gpu::GpuBlocks, public testing::WithParamInterface<std::tuple<Wrapping, Window>> {
 protected:
  [[nodiscard]] static const Wrapping& wrapping() { return std::get<0>(GetParam()); }
  [[nodiscard]] static const Window& window() { return std::get<1>(GetParam()); }

  BlockTraining train_widened(std::int64_t check_steps = 0) {
    return train([&](BlockModel& model) {
      return std::make_unique<OffloadEngine>(
          EngineAccess::engine(model, wrapping().options(device_, 4096).check_steps(check_steps), widened()));
    });
  }

  /// The window around the CUDA runtime; keeps its parts for the counts.
  std::shared_ptr<Runtime> widened() {
    std::shared_ptr<Runtime> result = make_runtime(device_);
    if (window().poison) {
      result = memory_ = std::make_shared<gpu::PoisonedMemory>(result);
      result = slots_ = std::make_shared<PoisonedSlots>(result);
    }
    return spinning_ = std::make_shared<gpu::SpinningRuntime>(result, window().spins);
  }

  void expect_the_window_was_wide() const {
    const gpu::Spins& spins = window().spins;
    const bool expected = spins.compute > 0 || spins.to_host > 0 || spins.to_device > 0 ||
                          (spins.launch > 0 && !wrapping().graph.empty());
    EXPECT_EQ(spinning_->count() > 10, expected);
    if (window().poison) {
      EXPECT_GT(memory_->count(), 200);
      EXPECT_EQ(memory_->captured_count() > 20, !wrapping().graph.empty());
      EXPECT_EQ(memory_->failures(), 0);
      EXPECT_GT(slots_->count(), 10);
    }
  }

  std::shared_ptr<gpu::PoisonedMemory> memory_;
  std::shared_ptr<PoisonedSlots> slots_;
  std::shared_ptr<gpu::SpinningRuntime> spinning_;
};

TEST_P(RaceWindowTest, GradientsEqualPlainTraining) {
  const BlockTraining plain = train();
  const BlockTraining run = train_widened();
  expect_plain(run, plain);
  EXPECT_GT(run.report.offloaded_bytes, 0);
  EXPECT_EQ(run.report.inline_reloads, 0);
  expect_the_window_was_wide();
}

class CheckedRaceWindowTest : public RaceWindowTest {};

TEST_P(CheckedRaceWindowTest, NothingIsUnordered) {
  const Report report = train_widened(kSteps).report;
  EXPECT_GT(report.checked_operations, 1000);
  EXPECT_EQ(report.order_findings, std::vector<std::string>());
}

const auto kWrappings = testing::Values(
    Wrapping{"eager", "", "blocks.*.*"}, Wrapping{"eager_some", "", "blocks.*.core_attn,blocks.*.proj"},
    Wrapping{"graphs_1", "blocks.*", "blocks.*.*", 1}, Wrapping{"graphs_2", "blocks.*", "blocks.*.*", 2},
    Wrapping{"graphs_3", "blocks.*", "blocks.*.*", 3},
    Wrapping{"graphs_2_accumulating", "blocks.*", "blocks.*.*", 2, true},
    Wrapping{"mixed", "blocks.1,blocks.2,blocks.4", "blocks.*.*", 2},
    Wrapping{"mixed_1", "blocks.0,blocks.3", "**", 1});

std::string name_of(const testing::TestParamInfo<std::tuple<Wrapping, Window>>& info) {
  return std::get<0>(info.param).name + "_" + std::get<1>(info.param).name;
}

INSTANTIATE_TEST_SUITE_P(
    Windows, RaceWindowTest,
    testing::Combine(kWrappings,
                     testing::Values(Window{"late_to_host", {.to_host = kAll.to_host}},
                                     Window{"late_to_device", {.to_device = kAll.to_device}},
                                     Window{"late_compute", {.compute = kAll.compute, .launch = kAll.launch}},
                                     Window{"all_late", kAll}, Window{"poison", {}, true},
                                     Window{"late_to_host_and_poison", {.to_host = kAll.to_host}, true},
                                     Window{"late_to_device_and_poison", {.to_device = kAll.to_device}, true},
                                     Window{"all_late_and_poison", kAll, true})),
    name_of);

INSTANTIATE_TEST_SUITE_P(Windows, CheckedRaceWindowTest,
                         testing::Combine(kWrappings, testing::Values(Window{"all_late_and_poison", kAll, true})),
                         name_of);

}  // namespace
}  // namespace sidestream::testing_model
