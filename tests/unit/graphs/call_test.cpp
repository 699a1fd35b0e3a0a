#include "sidestream/call.h"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "autocast_region.h"
#include "call_fixture.h"
#include "expect_throws.h"
#include "models/block_model.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "warnings.h"

namespace sidestream::testing_model {
namespace {

TEST_F(CallTest, ANewIntegerIsAnotherCapture) {
  OffloadEngine engine(model_, options().call_options(CallOptions().max_captures(2)));
  expect_plain(engine, 0, 3, 0);
  EXPECT_EQ(engine.report().captures, 8);
  expect_plain(engine, 3, 5, 4);
  EXPECT_EQ(engine.report().captures, 16);
  EXPECT_EQ(engine.report().recaptures, 4);
  EXPECT_EQ(engine.report().replays, 8);
  expect_plain(engine, 5, 6, 0);
  expect_plain(engine, 6, 7, 4);
  EXPECT_EQ(engine.report().captures, 16) << "both values replay";
  ExpectedWarnings warnings;
  expect_plain(engine, 7, 10, 8);
  expect_plain(engine, 10, 11, 12);
  EXPECT_EQ(engine.report().captures, 16) << "beyond the bound it runs eagerly";
  EXPECT_EQ(engine.report().replays, 0);
  const std::vector<std::string> texts = warnings.take();
  ASSERT_EQ(texts.size(), 4U) << "one for each block";
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "graphed call \"blocks.0\" needs more than the 2 captures", texts[0]);
  expect_plain(engine, 11, 13, 0);
  EXPECT_EQ(engine.report().replays, 8);
}

TEST_F(CallTest, ANewIntegerRunsEagerlyByOption) {
  OffloadEngine engine(model_, options().call_options(CallOptions().on_new_arguments(OnNewArguments::eager)));
  expect_plain(engine, 0, 3, 0);
  EXPECT_EQ(engine.report().eager_calls, 4) << "the sizing pass";
  expect_plain(engine, 3, 5, 4);
  EXPECT_EQ(engine.report().captures, 8);
  EXPECT_EQ(engine.report().replays, 0);
  expect_plain(engine, 5, 6, 0);
  EXPECT_EQ(engine.report().replays, 8);
}

TEST_F(CallTest, ANewIntegerIsAnErrorByOption) {
  OffloadEngine engine(model_, options().call_options(CallOptions().on_new_arguments(OnNewArguments::error)));
  expect_plain(engine, 0, 3, 0);
  EXPECT_THROWS(UsageError, "new value", {
    const auto step = engine.step();
    model_.loss_of(3, 4).backward();
  });
  expect_plain(engine, 4, 6, 0);
}

class CallMicrobatchTest : public CallTest, public testing::WithParamInterface<std::int64_t> {};

TEST_P(CallMicrobatchTest, AccumulateOneAfterTheOther) {
  OffloadEngine engine(model_, options(GraphOptions().side_streams(GetParam())));
  for (std::int64_t s = 0; s < 4; ++s) {
    expect_plain(engine, s, [&](BlockModel& model, std::int64_t step) {
      model.loss_of(10 * step).backward();
      model.loss_of(10 * step + 1).backward();
    });
  }
  EXPECT_EQ(engine.report().captures, 8) << "one capture serves both";
  EXPECT_EQ(engine.report().replays, 16);
}

TEST_P(CallMicrobatchTest, TwoInFlight) {
  OffloadEngine engine(model_, options(GraphOptions().side_streams(GetParam())));
  const auto run = [&](BlockModel& model, std::int64_t step) {
    const at::Tensor a = model.loss_of(10 * step);
    const at::Tensor b = model.loss_of(10 * step + 1);
    (step % 2 == 0 ? a : b).backward();
    (step % 2 == 0 ? b : a).backward();
  };
  for (std::int64_t s = 0; s < 4; ++s) {
    expect_plain(engine, s, run);
  }
  EXPECT_EQ(engine.report().captures, 16);
  EXPECT_EQ(engine.report().replays, 16);
}

INSTANTIATE_TEST_SUITE_P(SideStreams, CallMicrobatchTest, testing::Values(1, 2, 3));

TEST_F(CallTest, MicrobatchesInFlightAreBounded) {
  const auto in_flight = [&](BlockModel& model) {
    const at::Tensor a = model.loss_of(1);
    const at::Tensor b = model.loss_of(1);
    (a + b).backward();
  };
  OffloadEngine bounded(model_, options().call_options(CallOptions().max_captures(1)));
  expect_plain(bounded, 0, 2);
  {
    ExpectedWarnings warnings;
    for (std::int64_t s = 2; s < 4; ++s) {
      expect_plain(bounded, s, [&](BlockModel& model, std::int64_t /*step*/) { in_flight(model); });
    }
    EXPECT_EQ(warnings.take().size(), 4U) << "one for each block";
    EXPECT_EQ(bounded.report().replays, 8) << "the first; the second runs eagerly";
  }
  expect_plain(bounded, 4, 6);
  OffloadEngine refusing(model_, options().call_options(CallOptions().on_pending(OnPending::error)));
  expect_plain(refusing, 6, 8);
  EXPECT_THROWS(UsageError, "still pending", {
    const auto step = refusing.step();
    in_flight(model_);
  });
  expect_plain(refusing, 8, 10);
}

TEST_F(CallTest, NewShapesAreAnotherCapture) {
  OffloadEngine engine(model_, options());
  expect_plain(engine, 0, 2);
  for (std::int64_t s = 2; s < 5; ++s) {
    expect_plain(engine, s, [&](BlockModel& model, std::int64_t step) {
      const auto batch = batch_of(model.shape(), step, device_);
      model.loss(batch.tokens.slice(1, 0, 8), batch.targets.slice(1, 0, 8).contiguous()).backward();
    });
  }
  EXPECT_EQ(engine.report().captures, 16);
  expect_plain(engine, 5, 6);
}

TEST_F(CallTest, RunsEagerlyUnderNoGradAndInEval) {
  OffloadEngine engine(model_, options());
  expect_plain(engine, 0, 2);
  {
    const at::NoGradGuard no_grad;
    const double expected = plain_.loss_of(3).item<double>();
    const auto step = engine.step();
    EXPECT_EQ(model_.loss_of(3).item<double>(), expected);
  }
  EXPECT_EQ(engine.report().replays, 0);
  model_.eval();
  plain_.eval();
  expect_plain(engine, 4, 5);
  EXPECT_EQ(engine.report().replays, 0);
  model_.train();
  plain_.train();
  expect_plain(engine, 5, 6);
  EXPECT_EQ(engine.report().replays, 8);
  EXPECT_EQ(engine.report().captures, 8) << "what ran eagerly is not to be captured";
}

TEST_F(CallTest, PatternsThatMatchNothingListTheNames) {
  for (const bool graphs : {true, false}) {
    Options wrong = Options(device_).min_bytes(1024).graph("blocks.*");
    graphs ? wrong.graph("layers.*") : wrong.offload("blocks.*.core_attention");
    OffloadEngine engine(model_, wrong);
    {
      const auto step = engine.step();
      model_.loss_of(0).backward();
    }
    EXPECT_THROWS(UsageError, graphs ? "\"layers.*\" matches no call" : "core_attention\" matches no scope",
                  (void)engine.step());
    EXPECT_THROWS(UsageError, graphs ? "blocks.*" : "blocks.*.core_attn", (void)engine.step());
  }
}

TEST_F(CallTest, AModuleOfAnotherModelRunsPlainly) {
  OffloadEngine engine(model_, options());
  expect_plain(engine, 0, 2);
  BlockModel other{BlockModel::Shape{}};
  other.to(device_);
  (void)train_step(plain_, nullptr, [&] { plain_.loss_of(2).backward(); });
  (void)train_step(model_, &engine, [&] {
    other.loss_of(2).backward();
    model_.loss_of(2).backward();
  });
  EXPECT_EQ(engine.report().captures, 8);
  expect_plain(engine, 3, 5);
}

TEST_F(CallTest, AForwardThatThrowsLeavesTheEngineUsable) {
  OffloadEngine engine(model_, options());
  for (std::int64_t s = 0; s < 5; ++s) {
    EXPECT_THROWS(std::runtime_error, "the data broke", {
      const auto step = engine.step();
      const at::Tensor loss = model_.loss_of(40 + s);
      if (s % 2 == 0) {
        loss.backward();
      }
      throw std::runtime_error("the data broke");
    });
    expect_plain(engine, s, s + 1);
  }
  EXPECT_EQ(engine.report().captures, 8);
}

TEST_F(CallTest, ResetCapturesAnew) {
  OffloadEngine engine(model_, options());
  expect_plain(engine, 0, 3);
  engine.reset();
  engine.reset();
  expect_plain(engine, 3, 6);
  EXPECT_EQ(engine.report().captures, 16);
  EXPECT_EQ(engine.report().replays, 8);
}

TEST_F(CallTest, RunsUnderAutocast) {
  OffloadEngine engine(model_, options());
  for (std::int64_t s = 0; s < 4; ++s) {
    expect_plain(engine, s, [&](BlockModel& model, std::int64_t step) {
      at::Tensor loss;
      {
        const AutocastRegion autocast(device_.type());
        loss = model.loss_of(step);
      }
      loss.backward();
    });
  }
  EXPECT_EQ(engine.report().replays, 8);
}

}  // namespace
}  // namespace sidestream::testing_model
