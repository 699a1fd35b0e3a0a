// Experts that run one by one, on as many tokens as their router sends: what they save has another size in each step.
#include <cstddef>
#include <cstdint>
#include <deque>

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include "models/expert_model.h"
#include "models/plain_twin.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream::testing_model {
namespace {

class ExpertTrainingTest : public testing::Test {
 protected:
  ExpertTrainingTest() {
    mine_.to(device_);
    plain_.to(device_);
  }
  [[nodiscard]] Options options(std::size_t min_bytes) const {
    return Options(device_).min_bytes(min_bytes).offload("experts.*").lag(1);
  }
  /// Two forwards, and then a backward and a forward in turn.
  void train(ExpertModel& model, std::int64_t s, std::int64_t microbatches) const {
    std::deque<at::Tensor> losses;
    const auto backward = [&] {
      losses.front().backward({}, /*retain_graph=*/true);
      losses.front().backward();
      losses.pop_front();
    };
    for (std::int64_t i = 0; i < microbatches; ++i) {
      const std::int64_t number = microbatches * s + i;
      losses.push_back(model.loss(expert_tokens(number, 120 + 8 * (number % 5), device_)));
      if (losses.size() == 2) {
        backward();
      }
    }
    while (!losses.empty()) {
      backward();
    }
  }
  Report report_of_plain_steps(const Options& options, std::int64_t microbatches, std::int64_t steps = 6) {
    OffloadEngine engine(mine_, options);
    for (std::int64_t s = 0; s < steps; ++s) {
      expect_same_step(mine_, &engine, plain_, s, [&](ExpertModel& model) { train(model, s, microbatches); });
    }
    return engine.report();
  }

  sim::OneThread one_thread_;
  c10::Device device_ = find_device("sim");
  ExpertModel mine_;
  ExpertModel plain_;
};

bool says_that_most_is_small(const Report& report) {
  for (const std::string& note : report.notes) {
    if (note.find("lower min_bytes, or compute experts as one product") != std::string::npos) {
      return true;
    }
  }
  return false;
}

TEST_F(ExpertTrainingTest, ExpertsWhoseSizesChangeGivePlainGradients) {
  const Report report = report_of_plain_steps(options(512), 1);
  EXPECT_GT(report.offloaded_bytes, 40'000);
  EXPECT_EQ(report.pinned_allocations_after_planning, 0);
  EXPECT_FALSE(says_that_most_is_small(report));
}

TEST_F(ExpertTrainingTest, AFewSmallStoragesAreNoNoteHoweverManySteps) {
  const Report report = report_of_plain_steps(options(2048), 1, 40);
  std::int64_t small = 0;
  for (const ExclusionReport& exclusion : report.exclusions) {
    small += exclusion.reason == "small" ? exclusion.bytes : 0;
  }
  EXPECT_GT(40 * small, report.saved_bytes) << "those of all steps would be a note";
  EXPECT_LT(small, report.saved_bytes);
  EXPECT_FALSE(says_that_most_is_small(report));
}

TEST_F(ExpertTrainingTest, MicrobatchesInFlightAndRetainedGraphsGivePlainGradients) {
  EXPECT_GT(report_of_plain_steps(options(512), 3).offloaded_bytes, 40'000);
}

TEST_F(ExpertTrainingTest, BelowMinBytesAllStaysAndTheReportSaysWhatToDo) {
  const Report report = report_of_plain_steps(options(16 << 10), 1);
  EXPECT_EQ(report.offloaded_bytes, 0);
  EXPECT_EQ(report.pinned_bytes, 0);
  EXPECT_TRUE(says_that_most_is_small(report));
}

}  // namespace
}  // namespace sidestream::testing_model
