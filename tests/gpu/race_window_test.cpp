// Training on a GPU whose streams are held up before their work of one kind, and whose free memory is overwritten: gradients of
// plain training, bit for bit, on deterministic kernels, with new data in each step; and nothing unordered.
#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/Context.h>
#include <gtest/gtest.h>

#include "gpu/gpu_fixture.h"
#include "gpu/poisoned_memory.h"
#include "gpu/spinning_runtime.h"
#include "graphs/engine/engine_access.h"
#include "poisoned_slots.h"
#include "sidestream/engine.h"
#include "unit/graphs/block_model.h"
#include "unit/graphs/wrapping.h"

namespace sidestream {
namespace {

using testing_model::BlockModel;
using testing_model::PoisonedSlots;
using testing_model::Wrapping;

/// What is held up, and whether memory that is not in use is overwritten.
struct Window {
  std::string name;
  gpu::Spins spins;
  bool poison = false;
};

void PrintTo(const Window& value, std::ostream* out) { *out << value.name; }

// A copy of this model takes some 10 us, an operator as much; a spin of 200,000 cycles about 100 us.
constexpr std::int64_t kSteps = 6;
constexpr gpu::Spins kAll{.to_host = 200'000, .to_device = 200'000, .compute = 20'000, .launch = 200'000};

class RaceWindowTest : public gpu::Gpu, public testing::WithParamInterface<std::tuple<Wrapping, Window>> {
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

  [[nodiscard]] static const Wrapping& wrapping() { return std::get<0>(GetParam()); }
  [[nodiscard]] static const Window& window() { return std::get<1>(GetParam()); }

  /// Gradients of each step. Null `runtime`: without an engine.
  std::vector<std::vector<at::Tensor>> train(const std::shared_ptr<Runtime>& runtime, std::int64_t check_steps = 0) {
    const c10::Device device(c10::DeviceType::CUDA, 0);
    BlockModel model(shape_);
    model.to(device);
    std::unique_ptr<OffloadEngine> engine;
    if (runtime != nullptr) {
      engine = std::make_unique<OffloadEngine>(
          EngineAccess::engine(model, wrapping().options(device, 4096).check_steps(check_steps), runtime));
    }
    std::vector<std::vector<at::Tensor>> gradients;
    for (std::int64_t s = 0; s < kSteps; ++s) {
      const auto batch = testing_model::batch_of(shape_, s, device);
      testing_model::clear_gradients(model);
      if (engine != nullptr) {
        const auto step = engine->step();
        model.loss(batch.tokens, batch.targets).backward();
      } else {
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

  /// The window around the CUDA runtime; keeps its parts for the counts.
  std::shared_ptr<Runtime> widened() {
    std::shared_ptr<Runtime> result = make_runtime(c10::Device(c10::DeviceType::CUDA, 0));
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

  BlockModel::Shape shape_;
  Report report_;
  std::shared_ptr<gpu::PoisonedMemory> memory_;
  std::shared_ptr<PoisonedSlots> slots_;
  std::shared_ptr<gpu::SpinningRuntime> spinning_;
};

TEST_P(RaceWindowTest, GradientsEqualPlainTraining) {
  const auto plain = train(nullptr);
  const auto run = train(widened());
  for (std::size_t s = 0; s < plain.size(); ++s) {
    EXPECT_TRUE(testing_model::same(run[s], plain[s])) << "step " << s;
  }
  EXPECT_GT(report_.offloaded_bytes, 0);
  EXPECT_EQ(report_.inline_reloads, 0);
  expect_the_window_was_wide();
}

class CheckedRaceWindowTest : public RaceWindowTest {};

TEST_P(CheckedRaceWindowTest, NothingIsUnordered) {
  (void)train(widened(), kSteps);
  EXPECT_GT(report_.checked_operations, 1000);
  EXPECT_EQ(report_.order_findings, std::vector<std::string>());
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
}  // namespace sidestream
