// Eager groups of microbatches that wait for their backward while others run: when they come back.
#include <cstdint>
#include <deque>

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include "models/block_model.h"
#include "models/plain_twin.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"

namespace sidestream {
namespace {

using testing_model::BlockModel;
using testing_model::StepTensors;

constexpr std::int64_t kMicrobatches = 4;

/// A model and its plain twin.
struct PipelineTwins {
  PipelineTwins(const BlockModel::Shape& shape, c10::Device device) : plain(shape), mine(shape) {
    plain.to(device);
    mine.to(device);
  }
  BlockModel plain;
  BlockModel mine;
};

class EagerPipelineTest : public testing::Test {
 protected:
  [[nodiscard]] Options options() const { return Options(device_).min_bytes(1024).offload("blocks.*.*"); }

  /// `in_flight` forwards, then one backward and one forward in turn, then the rest.
  StepTensors step(BlockModel& model, OffloadEngine* engine, std::int64_t s, std::size_t in_flight) const {
    return testing_model::train_step(model, engine, [&] {
      std::deque<at::Tensor> losses;
      for (std::int64_t microbatch = 0; microbatch < kMicrobatches; ++microbatch) {
        const auto batch = testing_model::batch_of(shape_, kMicrobatches * s + microbatch, device_);
        losses.push_back(model.loss(batch.tokens, batch.targets) / kMicrobatches);
        if (losses.size() == in_flight) {
          losses.front().backward();
          losses.pop_front();
        }
      }
      for (at::Tensor& loss : losses) {
        loss.backward();
        loss = at::Tensor();
      }
    });
  }
  /// In a step with the engine, which is compared with plain training.
  std::int64_t inline_reloads(PipelineTwins& twins, OffloadEngine& engine, std::int64_t s,
                              std::size_t in_flight) const {
    EXPECT_TRUE(testing_model::same(step(twins.mine, &engine, s, in_flight), step(twins.plain, nullptr, s, in_flight)))
        << "step " << s;
    EXPECT_GT(engine.report().reloaded_bytes, 0);
    return engine.report().inline_reloads;
  }

  c10::Device device_ = find_device("sim");
  BlockModel::Shape shape_{.layers = 4};
};

TEST_F(EagerPipelineTest, NoBackwardBeginsWithAnInlineReload) {
  for (const std::size_t in_flight : {1, 2, 3, 4}) {
    PipelineTwins twins(shape_, device_);
    OffloadEngine engine(twins.mine, options());
    for (std::int64_t s = 0; s < 4; ++s) {
      const std::int64_t reloads = inline_reloads(twins, engine, s, in_flight);
      EXPECT_TRUE(s < 2 || reloads == 0) << in_flight << " in flight, step " << s << ": " << reloads;
    }
  }
}

TEST_F(EagerPipelineTest, AStepThatGoesAnotherWayIsRightAndTheNextOneKnowsIt) {
  PipelineTwins twins(shape_, device_);
  OffloadEngine engine(twins.mine, options());
  std::int64_t s = 0;
  for (const std::size_t in_flight : {2, 2, 2, 4, 4, 3, 3, 1, 1, 2, 2}) {
    const std::int64_t reloads = inline_reloads(twins, engine, s, in_flight);
    const bool known = s > 1 && s % 2 == 0;
    EXPECT_TRUE(reloads == 0 || !known) << "step " << s << ": " << reloads;
    ++s;
  }
}

}  // namespace
}  // namespace sidestream
