// Outputs of graphed calls that eager code saves: they leave with an eager group that is offloaded, and are held where none covers
// the reader. The same steps as in plain training, bit for bit.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "models/wave.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/report.h"
#include "sidestream/scope.h"

namespace sidestream::testing_model {
namespace {

/// Layers, each of which takes the output of the one before. Behind each stands a head, which saves that layer's output.
class SavedOutputTest : public testing::Test {
 protected:
  static constexpr std::int64_t kLayers = Waves::kCount;
  static constexpr std::int64_t kSteps = 4;
  static constexpr std::int64_t kOutputBytes = 16 * kHidden * 4;

  /// As callables, or by ss::call.
  void capture(const Options& options, bool by_call = false) {
    graphed_.clear();
    engine_.emplace(model_, by_call ? Options(options).graph("waves.*") : options);
    if (by_call) {
      return;
    }
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

  at::Tensor layer(Waves& model, std::int64_t i, const at::Tensor& h) {
    const bool replays = &model == &model_ && !graphed_.empty();
    return replays ? graphed_[static_cast<std::size_t>(i)]({h})[0] : call(&*model.layer(i), h);
  }
  /// Gradients and, where `held`, the outputs of all layers, which are held until the end.
  void expect_plain(std::int64_t first = 0, std::int64_t last = kSteps, bool held = false) {
    for (std::int64_t s = first; s < last; ++s) {
      expect_same_step(model_, &*engine_, plain_, s, [&](Waves& model) {
        std::vector<at::Tensor> kept;
        const at::Tensor x = rows(s, device_).requires_grad_(true);
        at::Tensor h = x;
        at::Tensor loss = x.mean();
        for (std::int64_t i = 0; i < kLayers; ++i) {
          h = layer(model, i, h);
          if (held) {
            kept.push_back(h.detach());
          }
          const OffloadScope scope("heads");
          loss = loss + h.cos().mul(h).mean();
        }
        h = at::Tensor();
        loss.backward();
        kept.push_back(x.grad());
        return values(kept);
      });
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
  for (const bool by_call : {false, true}) {
    capture(options().offload("heads"), by_call);
    SCOPED_TRACE(by_call ? "by ss::call" : "callables");
    for (std::int64_t s = 0; s < kSteps; ++s) {
      expect_plain(s, s + 1);
      EXPECT_EQ(engine_->report().unplanned_bytes, 0) << "step " << s;
      EXPECT_GE(engine_->report().offloaded_bytes, 2 * (kLayers - 3) * kOutputBytes) << "step " << s;
    }
    const Report report = engine_->report();
    EXPECT_EQ(report.offloaded_bytes, offloaded_by_heads());
    EXPECT_EQ(report.reloaded_bytes, report.offloaded_bytes);
    EXPECT_EQ(report.pinned_allocations_after_planning, 0);
    EXPECT_LE(report.outputs_copied, 2) << "of heads that need theirs at once";
  }
}

TEST_F(SavedOutputTest, IsCopiedOutWhereNoGroupCoversItsReader) {
  capture(options().offload("heads"));
  expect_plain();
  const Report left = engine_->report();
  capture(options());
  expect_plain();
  const Report held = engine_->report();
  EXPECT_EQ(held.offloaded_bytes, 0);
  EXPECT_GE(held.outputs_copied, kLayers - 2);
  EXPECT_EQ(held.outputs_copied_bytes, held.outputs_copied * kOutputBytes);
  EXPECT_GE(held.step_peak_bytes - left.step_peak_bytes, (kLayers - 4) * kOutputBytes) << "what is copied out counts";
}

TEST_F(SavedOutputTest, WhoHoldsItBesidesHasIt) {
  for (const bool by_call : {false, true}) {
    capture(options().offload("heads"), by_call);
    expect_plain(0, kSteps, /*held=*/true);
    EXPECT_GT(engine_->report().offloaded_bytes, 0);
    EXPECT_GE(engine_->report().outputs_copied, kLayers - 2);
  }
}

// With so much lag nothing would be let go of before it is needed.
TEST_F(SavedOutputTest, ComesBackToAGroupThatIsNotLetGoOf) {
  for (const bool by_call : {false, true}) {
    capture(options().offload("heads").lag(std::size_t{1} << 20), by_call);
    expect_plain();
    capture(options().offload("heads").lag(0), by_call);
    expect_plain();
    capture(options().offload("heads").lag(0).lookahead(std::size_t{1} << 20), by_call);
    expect_plain();
  }
}

TEST_F(SavedOutputTest, StaysWhereNoPinnedMemoryIsFree) {
  capture(options().offload("heads").host_cap(3 * kOutputBytes));
  expect_plain();
  EXPECT_LE(engine_->report().offloaded_bytes, 3 * kOutputBytes);
  EXPECT_GT(engine_->report().outputs_copied, 0);
}

}  // namespace
}  // namespace sidestream::testing_model
