// Training whose eager groups leave behind the next graph: when their copies are queued, how much stays until then, and what is
// refused. That the gradients are plain training's, under every schedule, is training_test.cpp's ("mixed_delayed").
#include <cstddef>
#include <cstdint>
#include <string>

#include <gtest/gtest.h>

#include "expect_throws.h"
#include "models/block_model.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

using testing_model::BlockModel;

class DelayedTrainingTest : public testing::Test {
 protected:
  DelayedTrainingTest() : model_(shape_) { model_.to(device_); }

  [[nodiscard]] Options mixed() const {
    return Options(device_).min_bytes(1024).graph("blocks.1,blocks.3").offload("blocks.*.*");
  }
  void train(OffloadEngine& engine, std::int64_t steps) {
    for (std::int64_t s = 0; s < steps; ++s) {
      auto step = engine.step();
      const auto batch = testing_model::batch_of(shape_, s, device_);
      model_.loss(batch.tokens, batch.targets).backward();
      step.finish();
      testing_model::clear_gradients(model_);
    }
  }

  /// Copies to the host of "blocks.0", "blocks.2" and "blocks.4" in the steps that replay.
  struct EagerCopies {
    std::int64_t behind_a_launch = 0;  ///< only copies, records and waits since a launch
    std::int64_t others = 0;
  };
  static EagerCopies copies_in(const Journal& journal) {
    EagerCopies result;
    bool behind_a_launch = false;
    for (const JournalOperation& operation : journal.operations) {
      const JournalSite& site = journal.sites[operation.site];
      const std::string block = journal.names[site.name].substr(0, std::string("blocks.0").size());
      if (operation.kind == JournalKind::compute) {  // a launch is written out as what its capture held
        behind_a_launch = block == "blocks.1" || block == "blocks.3";
      } else if (operation.kind == JournalKind::copy_to_host && site.step > 2 &&
                 (block == "blocks.0" || block == "blocks.2" || block == "blocks.4")) {
        ++(behind_a_launch ? result.behind_a_launch : result.others);
      }
    }
    return result;
  }

  c10::Device device_ = find_device("sim");
  BlockModel::Shape shape_{.layers = 5};
  BlockModel model_;
};

TEST_F(DelayedTrainingTest, CopiesOfDelayedGroupsAreQueuedBehindTheNextLaunch) {
  constexpr std::int64_t kChecked = 5;
  OffloadEngine engine(model_, mixed().delay("blocks.*.*").check_steps(kChecked));
  train(engine, kChecked);
  const EagerCopies copies = copies_in(engine.journal());
  EXPECT_GT(copies.behind_a_launch, 0);
  EXPECT_EQ(copies.others, 0) << "the lag holds all that lies between two calls";
  EXPECT_EQ(engine.report().order_findings, std::vector<std::string>());
}

TEST_F(DelayedTrainingTest, OtherGroupsLeaveAtTheirScopesEnd) {
  constexpr std::int64_t kChecked = 5;
  OffloadEngine engine(model_, mixed().check_steps(kChecked));
  train(engine, kChecked);
  EXPECT_GT(copies_in(engine.journal()).others, 0);
}

TEST_F(DelayedTrainingTest, NothingIsLostWhereNoBackwardComes) {
  OffloadEngine engine(model_, mixed().delay("**"));
  train(engine, 2);
  const std::int64_t whole = engine.report().offloaded_bytes;
  auto step = engine.step();
  const auto batch = testing_model::batch_of(shape_, 7, device_);
  const at::Tensor loss = model_.loss(batch.tokens, batch.targets);
  step.finish();
  EXPECT_EQ(engine.report().offloaded_bytes, whole) << "what leaves leaves at the step's end";
  loss.backward();
}

TEST_F(DelayedTrainingTest, PatternsThatNameNothingThatLeavesAreRefused) {
  for (const char* pattern : {"blocks.*.act1", "blocks.1.fc1", "head"}) {
    BlockModel model(shape_);
    model.to(device_);
    OffloadEngine engine(model, mixed().delay(pattern));
    {
      auto step = engine.step();
      const auto batch = testing_model::batch_of(shape_, 0, device_);
      model.loss(batch.tokens, batch.targets).backward();
    }
    EXPECT_THROWS(UsageError, "Options::delay", (void)engine.step());
    EXPECT_THROWS(UsageError, pattern, (void)engine.step());
  }
}

}  // namespace
}  // namespace sidestream
