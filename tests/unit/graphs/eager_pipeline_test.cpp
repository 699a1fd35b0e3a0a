// Eager groups of microbatches that wait for their backward while others run: when they come back.
#include <cstdint>
#include <deque>

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include "models/plain_twin.h"
#include "sidestream/engine.h"
#include "unit/graphs/call_fixture.h"

namespace sidestream::testing_model {
namespace {

constexpr std::int64_t kMicrobatches = 4;

class EagerPipelineTest : public CallTest {
 protected:
  [[nodiscard]] Options offloading() const { return Options(device_).min_bytes(1024).offload("blocks.*.*"); }

  /// `in_flight` forwards, then one backward and one forward in turn, then the rest.
  static void train(BlockModel& model, std::int64_t s, std::size_t in_flight) {
    std::deque<at::Tensor> losses;
    for (std::int64_t microbatch = 0; microbatch < kMicrobatches; ++microbatch) {
      losses.push_back(model.loss_of(kMicrobatches * s + microbatch) / kMicrobatches);
      if (losses.size() == in_flight) {
        losses.front().backward();
        losses.pop_front();
      }
    }
    for (at::Tensor& loss : losses) {
      loss.backward();
      loss = at::Tensor();
    }
  }
  /// In a step with the engine, which is compared with plain training.
  std::int64_t inline_reloads(std::int64_t s, std::size_t in_flight) {
    expect_plain(*engine_, s, [&](BlockModel& model, std::int64_t /*step*/) { train(model, s, in_flight); });
    EXPECT_GT(engine_->report().reloaded_bytes, 0);
    return engine_->report().inline_reloads;
  }

  std::optional<OffloadEngine> engine_;
};

TEST_F(EagerPipelineTest, NoBackwardBeginsWithAnInlineReload) {
  for (const std::size_t in_flight : {1, 2, 3, 4}) {
    engine_.emplace(model_, offloading());
    for (std::int64_t s = 0; s < 4; ++s) {
      const std::int64_t reloads = inline_reloads(s, in_flight);
      EXPECT_TRUE(s < 2 || reloads == 0) << in_flight << " in flight, step " << s << ": " << reloads;
    }
  }
}

TEST_F(EagerPipelineTest, AStepThatGoesAnotherWayIsRightAndTheNextOneKnowsIt) {
  engine_.emplace(model_, offloading());
  std::int64_t s = 0;
  for (const std::size_t in_flight : {2, 2, 2, 4, 4, 3, 3, 1, 1, 2, 2}) {
    const std::int64_t reloads = inline_reloads(s, in_flight);
    const bool known = s > 1 && s % 2 == 0;
    EXPECT_TRUE(reloads == 0 || !known) << "step " << s << ": " << reloads;
    ++s;
  }
}

}  // namespace
}  // namespace sidestream::testing_model
