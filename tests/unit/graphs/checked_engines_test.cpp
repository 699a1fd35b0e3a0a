// Checked steps of two engines that overlap on one thread, and end in any order: each journal has what its own step saw.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "models/block_model.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "warnings.h"

namespace sidestream::testing_model {
namespace {

constexpr std::int64_t kSteps = 4;

std::int64_t count(const Journal& journal, std::string_view name) {
  return std::count_if(journal.operations.begin(), journal.operations.end(),
                       [&](const JournalOperation& operation) { return journal.names[operation.name] == name; });
}

class CheckedEnginesTest : public testing::Test {
 protected:
  CheckedEnginesTest() {
    one_.to(device_);
    two_.to(device_);
  }
  [[nodiscard]] Options options(std::int64_t checked = kSteps) const {
    return Options(device_).min_bytes(1024).graph("blocks.*").offload("blocks.*.*").check_steps(checked);
  }
  void train(BlockModel& model, std::int64_t s) const {
    clear_gradients(model);
    const auto batch = batch_of(shape_, s, device_);
    model.loss(batch.tokens, batch.targets).backward();
  }
  /// Operators that nothing else runs, by which a journal tells what it has heard.
  void mark_with_erfinv() const { (void)at::erfinv(mark_); }
  void mark_with_digamma() const { (void)at::digamma(mark_); }
  void mark_with_sinc() const { (void)at::sinc(mark_); }
  /// Steps of both; what each journal has heard of the three marks.
  void overlapped(OffloadEngine& outer, OffloadEngine& inner, bool outer_first) {
    for (std::int64_t s = 0; s < kSteps; ++s) {
      std::optional<Step> outer_step(outer.step());
      mark_with_erfinv();
      train(one_, s);
      std::optional<Step> inner_step(inner.step());
      train(two_, s);
      train(one_, 100 + s);
      mark_with_digamma();
      (outer_first ? outer_step : inner_step)->finish();
      mark_with_sinc();
      train(outer_first ? two_ : one_, 200 + s);
      (outer_first ? inner_step : outer_step)->finish();
    }
  }

  c10::Device device_ = find_device("sim");
  BlockModel::Shape shape_{.layers = 2};
  BlockModel one_{shape_};
  BlockModel two_{shape_};
  at::Tensor mark_ = at::full({4}, 0.25, at::TensorOptions().device(device_));
};

TEST_F(CheckedEnginesTest, EachJournalHasWhatItsStepSawInWhateverOrderTheyEnd) {
  for (const bool outer_first : {false, true}) {
    OffloadEngine outer(one_, options());
    OffloadEngine inner(two_, options());
    overlapped(outer, inner, outer_first);
    EXPECT_EQ(outer.report().order_findings, std::vector<std::string>()) << outer_first;
    EXPECT_EQ(inner.report().order_findings, std::vector<std::string>()) << outer_first;
    const Journal of_outer = outer.journal();
    const Journal of_inner = inner.journal();
    EXPECT_EQ(count(of_outer, "aten::erfinv"), kSteps);
    EXPECT_EQ(count(of_inner, "aten::erfinv"), 0);
    EXPECT_EQ(count(of_outer, "aten::digamma"), kSteps) << outer_first;
    EXPECT_EQ(count(of_inner, "aten::digamma"), kSteps) << outer_first;
    EXPECT_EQ(count(of_outer, "aten::sinc"), outer_first ? 0 : kSteps);
    EXPECT_EQ(count(of_inner, "aten::sinc"), outer_first ? kSteps : 0);
  }
  OffloadEngine next(one_, options());
  for (std::int64_t s = 0; s < kSteps; ++s) {
    const auto step = next.step();
    mark_with_erfinv();
    train(one_, s);
  }
  EXPECT_EQ(count(next.journal(), "aten::erfinv"), kSteps) << "the thread is as it was before";
  EXPECT_EQ(next.report().order_findings, std::vector<std::string>());
}

TEST_F(CheckedEnginesTest, TheCaptureOfAnotherEngineIsInNoJournalButItsOwn) {
  for (const std::int64_t checked : {std::int64_t{0}, kSteps}) {
    OffloadEngine outer(one_, options());
    OffloadEngine inner(two_, options(checked));
    overlapped(outer, inner, /*outer_first=*/false);
    EXPECT_GT(inner.report().captures, 0);
    EXPECT_EQ(outer.report().order_findings, std::vector<std::string>());
  }
}

TEST_F(CheckedEnginesTest, AStepThatGoesOnAnotherThreadLeavesTheNextOnesJournalWhole) {
  auto engine = std::make_unique<OffloadEngine>(one_, options());
  std::optional<Step> step(engine->step());
  train(one_, 0);
  std::thread([&] {
    ExpectedWarnings warnings;
    step.reset();
    engine.reset();
  }).join();
  OffloadEngine next(one_, options());
  for (std::int64_t s = 0; s < kSteps; ++s) {
    const auto active = next.step();
    mark_with_erfinv();
    train(one_, s);
  }
  EXPECT_EQ(count(next.journal(), "aten::erfinv"), kSteps);
  EXPECT_EQ(next.report().order_findings, std::vector<std::string>());
}

}  // namespace
}  // namespace sidestream::testing_model
