// Outputs of graphed calls that eager code saves: they leave with an eager group that is offloaded, and are held where none covers
// the reader. The same steps as in plain training, bit for bit.
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "models/wave.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/report.h"
#include "sidestream/scope.h"

namespace sidestream {
namespace {

using testing_model::rows;
using testing_model::same;
using testing_model::StepTensors;
using testing_model::Wave;
using testing_model::Waves;

/// A stack of callables, each but the first linked to the one before; behind each a head, which saves that layer's output.
class SavedOutputTest : public testing::Test {
 protected:
  static constexpr std::int64_t kLayers = Waves::kCount;
  static constexpr std::int64_t kSteps = 4;
  static constexpr std::int64_t kOutputBytes = 16 * testing_model::kHidden * 4;

  void capture(const Options& options) {
    engine_.emplace(model_, options);
    std::vector<Callable> callables;
    std::vector<std::vector<Sample>> samples;
    for (std::int64_t i = 0; i < kLayers; ++i) {
      callables.emplace_back(
          "waves." + std::to_string(i), [](Wave& wave, const Tensors& in) { return Tensors{wave.forward(in[0])}; },
          model_.layer(i));
      samples.push_back({i == 0 ? Sample(rows(50, device_).requires_grad_(true)) : Sample::output_of(i - 1)});
    }
    graphed_ = make_graphed_callables(*engine_, callables, samples, GraphOptions());
  }
  [[nodiscard]] Options options() const { return Options(device_).min_bytes(1024); }

  /// Gives the gradients and, where `held`, the outputs of all layers, which are held until the end.
  StepTensors step(Waves& model, OffloadEngine* engine, std::int64_t s, bool held) {
    std::vector<at::Tensor> kept;
    StepTensors results = testing_model::train_step(model, engine, [&] {
      const at::Tensor x = rows(s, device_).requires_grad_(true);
      at::Tensor h = x;
      at::Tensor loss = x.mean();
      for (std::int64_t i = 0; i < kLayers; ++i) {
        h = engine != nullptr ? graphed_[static_cast<std::size_t>(i)]({h})[0] : model.layer(i)->forward(h);
        if (held) {
          kept.push_back(h.detach());
        }
        const OffloadScope scope("heads");
        loss = loss + h.cos().mul(h).mean();
      }
      h = at::Tensor();
      loss.backward();
      kept.push_back(x.grad());
    });
    for (const at::Tensor& tensor : kept) {
      results.emplace_back("kept", tensor);
    }
    return results;
  }
  void expect_plain(bool held = false) {
    for (std::int64_t s = 0; s < kSteps; ++s) {
      EXPECT_TRUE(same(step(model_, &*engine_, s, held), step(plain_, nullptr, s, held))) << "step " << s;
    }
  }
  /// Of all groups "heads".
  [[nodiscard]] std::int64_t offloaded_by_heads() const {
    std::int64_t bytes = 0;
    for (const GroupReport& group : engine_->report().groups) {
      bytes += group.name == "heads" ? group.offloaded_bytes : 0;
    }
    return bytes;
  }

  c10::Device device_ = find_device("sim");
  Waves model_{device_};
  Waves plain_{device_};
  std::optional<OffloadEngine> engine_;
  std::vector<GraphedCallable> graphed_;
};

// A head saves its input and its cosine, of which the last two heads need what they save at once.
TEST_F(SavedOutputTest, LeavesWithTheGroupThatSavesIt) {
  capture(options().offload("heads"));
  expect_plain();
  const Report report = engine_->report();
  EXPECT_GE(report.offloaded_bytes, 2 * (kLayers - 3) * kOutputBytes);
  EXPECT_EQ(report.offloaded_bytes, offloaded_by_heads());
  EXPECT_EQ(report.reloaded_bytes, report.offloaded_bytes);
  EXPECT_EQ(report.unplanned_bytes, 0);
  EXPECT_EQ(report.pinned_allocations_after_planning, 0);
  EXPECT_LE(report.outputs_copied, 2) << "of heads that need theirs at once";
}

TEST_F(SavedOutputTest, IsCopiedOutWhereNoGroupCoversItsReader) {
  capture(options().offload("heads"));
  expect_plain();
  const Report left = engine_->report();
  graphed_.clear();
  engine_.reset();
  capture(options());
  expect_plain();
  const Report held = engine_->report();
  EXPECT_EQ(held.offloaded_bytes, 0);
  EXPECT_GE(held.outputs_copied, kLayers - 2);
  EXPECT_EQ(held.outputs_copied_bytes, held.outputs_copied * kOutputBytes);
  EXPECT_GE(held.step_peak_bytes - left.step_peak_bytes, (kLayers - 4) * kOutputBytes) << "what is copied out counts";
}

TEST_F(SavedOutputTest, WhoHoldsItBesidesHasIt) {
  capture(options().offload("heads"));
  expect_plain(/*held=*/true);
  EXPECT_GT(engine_->report().offloaded_bytes, 0);
  EXPECT_GE(engine_->report().outputs_copied, kLayers - 2);
}

// With so much lag nothing would be let go of before it is needed.
TEST_F(SavedOutputTest, ComesBackToAGroupThatIsNotLetGoOf) {
  capture(options().offload("heads").lag(std::size_t{1} << 20));
  expect_plain();
  capture(options().offload("heads").lag(0));
  expect_plain();
  capture(options().offload("heads").lag(0).lookahead(std::size_t{1} << 20));
  expect_plain();
}

TEST_F(SavedOutputTest, StaysWhereNoPinnedMemoryIsFree) {
  capture(options().offload("heads").host_cap(3 * kOutputBytes));
  expect_plain();
  EXPECT_LE(engine_->report().offloaded_bytes, 3 * kOutputBytes);
  EXPECT_GT(engine_->report().outputs_copied, 0);
}

}  // namespace
}  // namespace sidestream
