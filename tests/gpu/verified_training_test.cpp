// Verified replays on a GPU: the training stays plain training's, and what a graph froze is found.
#include <memory>

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "gpu/gpu_blocks.h"
#include "models/block_model.h"
#include "models/ruled_model.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"

namespace sidestream::testing_model {
namespace {

class GpuVerifiedTrainingTest : public gpu::GpuBlocks {};

TEST_F(GpuVerifiedTrainingTest, VerifiedTrainingIsPlainTraining) {
  const BlockTraining plain = train();
  const BlockTraining run = train([&](BlockModel& model) {
    return std::make_unique<OffloadEngine>(
        model, Options(device_).min_bytes(4096).graph("blocks.*").offload("blocks.*.*").verify_replays(1000));
  });
  expect_plain(run, plain);
  EXPECT_EQ(run.report.verified_forwards, kSteps - 1);
  EXPECT_EQ(run.report.verified_backwards, kSteps - 1);
  EXPECT_GT(run.report.offloaded_bytes, 0);
}

TEST_F(GpuVerifiedTrainingTest, APlainMemberThatHasChangedIsFound) {
  const auto step = [&](OffloadEngine& engine, RuledModel& model) {
    const auto active = engine.step();
    model.forward(at::full({2, RuledLayer::kWidth}, 3.0, device_)).sum().backward();
  };
  RuledModel of_output(
      1, [](RuledLayer& l, const at::Tensor& x) { return x * l.weight * l.member; }, device_);
  RuledModel of_gradient(
      1, [](RuledLayer& l, const at::Tensor& x) { return x * l.weight + l.member * (l.extra - l.extra.detach()); },
      device_);
  for (RuledModel* model : {&of_output, &of_gradient}) {
    OffloadEngine engine(*model, Options(device_).graph("layers.*").verify_replays(1000));
    step(engine, *model);
    step(engine, *model);
    EXPECT_EQ(engine.report().verified_backwards, 1);
    model->layer(0).member = 2;
    EXPECT_THROWS(VerificationError,
                  model == &of_output ? "output 0 differs first at [0, 0]: 3 replayed, 6 run eagerly"
                                      : "gradient of layers.0.extra differs first at [0]: 2 replayed, 4 run eagerly",
                  step(engine, *model));
  }
}

}  // namespace
}  // namespace sidestream::testing_model
