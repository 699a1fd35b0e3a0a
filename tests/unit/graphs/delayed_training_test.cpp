// Training whose eager groups leave behind the next graph: when their copies are queued, how much stays until then, and what is
// refused. That the gradients are plain training's, under every schedule, is training_test.cpp's ("mixed_delayed").
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "expect_throws.h"
#include "graphs/engine/engine_access.h"
#include "models/block_model.h"
#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "runtime/forwarding_runtime.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/scope.h"

namespace sidestream::testing_model {
namespace {

class DelayedTrainingTest : public testing::Test {
 protected:
  DelayedTrainingTest() : model_(shape_) { model_.to(device_); }

  [[nodiscard]] Options mixed() const {
    return Options(device_).min_bytes(1024).graph("blocks.1,blocks.3").offload("blocks.*.*");
  }
  void train(OffloadEngine& engine, std::int64_t steps) {
    for (std::int64_t s = 0; s < steps; ++s) {
      auto step = engine.step();
      model_.loss_of(s).backward();
      step.finish();
      clear_gradients(model_);
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
  const at::Tensor loss = model_.loss_of(7);
  step.finish();
  EXPECT_EQ(engine.report().offloaded_bytes, whole) << "what leaves leaves at the step's end";
  loss.backward();
}

/// Fails the first copy to the host behind a launch, once.
class FailsACopyBehindALaunch final : public ForwardingRuntime {
 public:
  using ForwardingRuntime::ForwardingRuntime;
  void arm() {
    armed_ = true;
    launched_ = false;
  }
  void launch(const Graph& graph, c10::Stream stream) override {
    inner().launch(graph, stream);
    launched_ = true;
  }
  void copy_to_host(void* pinned, const void* device, std::size_t bytes, c10::Stream stream) override {
    if (launched_ && std::exchange(armed_, false)) {
      throw DeviceError("the copy was made to fail");
    }
    inner().copy_to_host(pinned, device, bytes, stream);
  }

 private:
  bool armed_ = false;
  bool launched_ = false;
};

// The graph adds into .grad itself, and has been launched.
TEST_F(DelayedTrainingTest, ABackwardThatFailsBehindItsLaunchAtACopyIsNotRunAgain) {
  const auto runtime = std::make_shared<FailsACopyBehindALaunch>(make_runtime(device_));
  const Options options = Options(device_)
                              .min_bytes(1024)
                              .graph("blocks.*")
                              .offload("**")
                              .delay("aside")
                              .lag(4096)
                              .graph_options(GraphOptions().gradients("**", GradientPolicy::accumulated));
  OffloadEngine engine(EngineAccess::engine(model_, options, runtime));
  BlockModel plain(shape_);
  plain.to(device_);
  const at::Tensor x = rows(0, device_).requires_grad_(true);
  const auto in_scope = [&](const char* name, const at::Tensor& from) {
    const OffloadScope scope(name);
    return from.exp();
  };
  const auto expect_plain = [&](std::int64_t s) {
    expect_same_step(model_, &engine, plain, s, [&](BlockModel& model) {
      const at::Tensor loss = model.loss_of(s);
      const at::Tensor aside = in_scope("aside", x);  // leaves behind the first backward
      loss.backward();
      in_scope("last", at::cat({aside, aside})).sum().backward();  // which the lag keeps
    });
  };
  for (std::int64_t s = 0; s < 3; ++s) {
    expect_plain(s);
  }
  const auto of_last_block = [](const BlockModel& model) {
    StepTensors gradients;
    for (const auto& parameter : model.named_parameters()) {
      if (parameter.key().find("blocks.4.") == 0) {
        gradients.emplace_back(parameter.key(), parameter.value().grad());
      }
    }
    return gradients;
  };
  model_.zero_grad();
  plain.zero_grad();
  plain.loss_of(3).backward();
  {
    Step step = engine.step();
    const at::Tensor loss = model_.loss_of(3);
    const at::Tensor aside = in_scope("aside", x);
    runtime->arm();
    EXPECT_THROWS(DeviceError, "the copy was made to fail", loss.backward({}, /*retain_graph=*/true));
    EXPECT_TRUE(same(of_last_block(model_), of_last_block(plain)));
    EXPECT_THROWS(UsageError, "failed after its graph had begun to add into .grad", loss.backward());
    EXPECT_TRUE(same(of_last_block(model_), of_last_block(plain)));
    in_scope("last", at::cat({aside, aside})).sum().backward();
    step.finish();
  }
  model_.zero_grad();
  expect_plain(4);
}

TEST_F(DelayedTrainingTest, PatternsThatNameNothingThatLeavesAreRefused) {
  for (const char* pattern : {"blocks.*.act1", "blocks.1.fc1", "head"}) {
    BlockModel model(shape_);
    model.to(device_);
    OffloadEngine engine(model, mixed().delay(pattern));
    {
      auto step = engine.step();
      model.loss_of(0).backward();
    }
    EXPECT_THROWS(UsageError, "Options::delay", (void)engine.step());
    EXPECT_THROWS(UsageError, pattern, (void)engine.step());
  }
}

}  // namespace
}  // namespace sidestream::testing_model
