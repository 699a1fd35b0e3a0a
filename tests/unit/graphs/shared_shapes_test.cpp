// Captures of several shapes of one call that share device memory, and what becomes of more than there may be.
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "graphs/engine/engine_access.h"
#include "models/plain_twin.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/testing/simulator.h"
#include "unit/graphs/called_stack.h"
#include "warnings.h"

namespace sidestream::testing_model {
namespace {

class SharedShapesTest : public testing::Test {
 protected:
  ~SharedShapesTest() override { set_schedule(device_, Schedule()); }

  [[nodiscard]] static CallOptions sharing() { return CallOptions().share_memory(true); }
  [[nodiscard]] Options options(const CallOptions& calls) const {
    return Options(device_).min_bytes(1024).graph("layers.*").offload("layers.*.*").call_options(calls);
  }
  [[nodiscard]] at::Tensor data(std::int64_t s, std::int64_t length, std::int64_t salt = 0) const {
    return at::cat({rows(s, device_, salt), rows(s, device_, salt + 7)}).narrow(0, 0, length).clone();
  }
  /// Pinned bytes that captures hold.
  [[nodiscard]] static std::size_t leased(const OffloadEngine& engine) {
    return EngineAccess::state(engine).arena().stats().leased;
  }
  /// Forward and backward on new data of this length.
  void train(CalledStack& model, std::int64_t s, std::int64_t length) const {
    (model.forward(data(s, length).requires_grad_(true)) * data(s, length, 1)).mean().backward();
  }
  /// A step whose microbatches have these lengths, one after the other.
  void expect_plain(OffloadEngine& engine, std::int64_t s, const std::vector<std::int64_t>& lengths) {
    expect_same_step(model_, &engine, plain_, s, [&](CalledStack& model) {
      for (std::size_t i = 0; i < lengths.size(); ++i) {
        train(model, 50 * s + static_cast<std::int64_t>(i), lengths[i]);
      }
    });
  }
  /// A step of two forwards, then both backwards.
  void expect_plain_interleaved(OffloadEngine& engine, std::int64_t s, std::int64_t first, std::int64_t second) {
    expect_same_step(model_, &engine, plain_, s, [&](CalledStack& model) {
      const at::Tensor y = model.forward(data(s, first).requires_grad_(true));
      const at::Tensor z = model.forward(data(s, second, 3).requires_grad_(true));
      z.mean().backward();
      y.mean().backward();
    });
  }

  c10::Device device_ = find_device("sim");
  CalledStack model_{device_};
  CalledStack plain_{device_};
};

class SharedShapesOrderTest : public SharedShapesTest, public testing::WithParamInterface<std::string> {};

TEST_P(SharedShapesOrderTest, StepsOfAnyLengthGiveThePlainGradients) {
  OffloadEngine engine(model_, options(sharing()));
  set_schedule(device_, Schedule::parse(GetParam()));
  std::int64_t s = 0;
  for (const std::int64_t length : {32, 8, 20, 8, 32, 20, 20, 32, 8, 20}) {
    expect_plain(engine, s++, {length});
  }
  const Report report = engine.report();
  EXPECT_EQ(report.captures, 3 * 6);
  EXPECT_GT(report.offloaded_bytes, 0);
}

INSTANTIATE_TEST_SUITE_P(Schedules, SharedShapesOrderTest,
                         testing::Values("early", "late", "d2h-early", "d2h-late", "seed:1", "seed:2", "seed:3"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace_if(
                               name.begin(), name.end(), [](char c) { return c == '-' || c == ':'; }, '_');
                           return name;
                         });

TEST_F(SharedShapesTest, MicrobatchesOfSeveralLengthsGiveThePlainGradients) {
  OffloadEngine engine(model_, options(sharing()));
  for (std::int64_t s = 0; s < 6; ++s) {
    expect_plain(engine, s, {32, 8 + 4 * (s % 3), 32});
  }
  EXPECT_EQ(engine.report().captures, 4 * 6);
}

TEST_F(SharedShapesTest, ACallBesideAPendingOneRunsEagerly) {
  OffloadEngine engine(model_, options(sharing()));
  expect_plain(engine, 0, {32});
  expect_plain(engine, 1, {16});
  expect_plain(engine, 2, {32, 16});
  const std::int64_t before = engine.report().eager_calls;
  expect_plain_interleaved(engine, 3, 32, 16);
  EXPECT_EQ(engine.report().eager_calls - before, 3);
}

// A capture for microbatches in flight, of another memory.
TEST_F(SharedShapesTest, ACallBesideAPendingOneReplaysWhereACaptureOfItIsFree) {
  OffloadEngine engine(model_, options(sharing()));
  expect_plain_interleaved(engine, 0, 32, 32);  // two captures of this length
  expect_plain_interleaved(engine, 1, 32, 32);
  expect_plain(engine, 2, {16});  // and one of this, in the memory of the first of them
  expect_plain(engine, 3, {16});
  const std::int64_t eager = engine.report().eager_calls;
  expect_plain_interleaved(engine, 4, 16, 32);
  EXPECT_EQ(engine.report().eager_calls, eager);
}

TEST_F(SharedShapesTest, ACallBesideAPendingOneIsRefusedByOption) {
  OffloadEngine engine(model_, options(sharing().on_pending(OnPending::error)));
  expect_plain(engine, 0, {32});
  expect_plain(engine, 1, {16});
  expect_plain(engine, 2, {32, 16});
  {
    auto step = engine.step();
    const at::Tensor y = model_.forward(data(3, 32).requires_grad_(true));
    EXPECT_THROWS(UsageError, "which shares its memory, is still pending",
                  (void)model_.forward(data(3, 16).requires_grad_(true)));
    y.mean().backward();
    step.finish();
  }
  clear_gradients(model_);
  clear_gradients(plain_);
  expect_plain(engine, 4, {16});
}

TEST_F(SharedShapesTest, AForwardBesideAPendingOneOfItsShapeRunsEagerlyByOption) {
  OffloadEngine engine(model_, options(CallOptions().on_pending(OnPending::eager)));
  expect_plain(engine, 0, {32});
  expect_plain(engine, 1, {32});
  const std::int64_t eager = engine.report().eager_calls;
  expect_plain_interleaved(engine, 3, 32, 32);
  EXPECT_EQ(engine.report().eager_calls - eager, 3);
  expect_plain(engine, 5, {32});
}

TEST_F(SharedShapesTest, NewShapesRunEagerlyWithOneWarning) {
  OffloadEngine engine(model_, options(sharing().on_new_arguments(OnNewArguments::eager)));
  expect_plain(engine, 0, {32});
  expect_plain(engine, 1, {32});
  ExpectedWarnings warnings;
  expect_plain(engine, 2, {16});
  expect_plain(engine, 3, {20});
  const std::vector<std::string> texts = warnings.take();
  ASSERT_EQ(texts.size(), 3U);
  EXPECT_NE(texts[0].find("graphed call \"layers.0\" runs eagerly: its arguments match none"), std::string::npos);
  EXPECT_EQ(engine.report().captures, 6);
}

TEST_F(SharedShapesTest, TheLeastRecentlyUsedMakesRoom) {
  OffloadEngine engine(model_, options(sharing().max_captures(2).on_max_captures(OnMaxCaptures::drop_least_used)));
  std::int64_t s = 0;
  for (const std::int64_t length : {32, 32, 16, 16, 32}) {
    expect_plain(engine, s++, {length});
  }
  EXPECT_EQ(engine.report().captures, 12);
  const std::size_t before = leased(engine);
  expect_plain(engine, s++, {20});  // takes the place of 16
  expect_plain(engine, s++, {20});
  EXPECT_EQ(engine.report().captures, 18);
  EXPECT_EQ(leased(engine), before) << "what 32 needs";
  const std::int64_t eager = engine.report().eager_calls;
  expect_plain(engine, s++, {32});  // is still there
  expect_plain(engine, s++, {20});
  EXPECT_EQ(engine.report().eager_calls, eager);
  expect_plain(engine, s++, {16});  // is not
  EXPECT_EQ(engine.report().eager_calls, eager + 3);
}

TEST_F(SharedShapesTest, PinnedMemoryIsWhatTheLargestNeeds) {
  const auto leased_by = [&](const std::vector<std::int64_t>& lengths) {
    OffloadEngine engine(model_, options(sharing()));
    std::int64_t s = 0;
    for (const std::int64_t length : lengths) {
      expect_plain(engine, s++, {length});
      expect_plain(engine, s++, {length});
    }
    for (const std::int64_t length : lengths) {
      expect_plain(engine, s++, {length});
    }
    EXPECT_GT(engine.report().offloaded_bytes, 0);
    return leased(engine);
  };
  const std::size_t largest = leased_by({32});
  EXPECT_EQ(largest, 4 * leased_by({8}));
  EXPECT_EQ(leased_by({32, 20, 8}), largest);
  EXPECT_EQ(leased_by({8, 20, 32}), largest);
  EXPECT_EQ(leased_by({20, 12, 32, 28}), largest);
}

TEST_F(SharedShapesTest, ADroppedCaptureGivesBackThePinnedMemoryThatTheOthersDoNotNeed) {
  OffloadEngine engine(model_, options(sharing().max_captures(1).on_max_captures(OnMaxCaptures::drop_least_used)));
  expect_plain(engine, 0, {8});
  expect_plain(engine, 1, {8});
  const std::size_t small = leased(engine);
  expect_plain(engine, 2, {32});
  expect_plain(engine, 3, {32});
  EXPECT_EQ(leased(engine), 4 * small);
  expect_plain(engine, 4, {8});
  expect_plain(engine, 5, {8});
  EXPECT_EQ(leased(engine), small);
}

TEST_F(SharedShapesTest, ACaptureThatNobodyReplayedYetIsTheLatest) {
  OffloadEngine engine(model_, options(sharing().max_captures(2).on_max_captures(OnMaxCaptures::drop_least_used)));
  std::int64_t s = 0;
  for (const std::int64_t length : {32, 32, 16, 20}) {  // 20 takes the place of 32
    expect_plain(engine, s++, {length});
  }
  const std::int64_t eager = engine.report().eager_calls;
  expect_plain(engine, s++, {16});
  expect_plain(engine, s++, {20});
  EXPECT_EQ(engine.report().eager_calls, eager);
}

TEST_F(SharedShapesTest, WhatOtherCallsCapturedBesideADroppedOneStays) {
  OffloadEngine engine(model_, options(CallOptions().max_captures(1).on_max_captures(OnMaxCaptures::drop_least_used)));
  // The last layer sees one shape, whatever the others do.
  const auto step = [&](std::int64_t s, std::int64_t length) {
    expect_same_step(model_, &engine, plain_, s, [&](CalledStack& model) {
      const at::Tensor h = model.run_layer(1, model.run_layer(0, data(s, length).requires_grad_(true)));
      (model.run_layer(2, h.narrow(0, 0, 8).clone()).mean() + h.mean()).backward();
    });
  };
  step(0, 32);
  step(1, 32);
  EXPECT_EQ(engine.report().captures, 6);
  std::int64_t eager = engine.report().eager_calls;
  step(2, 16);
  step(3, 16);
  EXPECT_EQ(engine.report().captures, 10) << "of the two whose shape changed";
  EXPECT_EQ(engine.report().eager_calls - eager, 2) << "of the same, once";
  // What is left of both is captured again where its weights lie then.
  relocate(model_);
  eager = engine.report().eager_calls;
  step(4, 16);
  step(5, 16);
  EXPECT_EQ(engine.report().recaptures, 3);
  EXPECT_EQ(engine.report().eager_calls, eager);
}

TEST_F(SharedShapesTest, AStepThatFailsDropsNothing) {
  OffloadEngine engine(model_, options(sharing().max_captures(1).on_max_captures(OnMaxCaptures::drop_least_used)));
  expect_plain(engine, 0, {32});
  expect_plain(engine, 1, {32});
  EXPECT_THROW(in_step(&engine,
                       [&] {
                         (void)model_.forward(data(2, 16).requires_grad_(true));
                         throw std::runtime_error("of the trainer");
                       }),
               std::runtime_error);
  const std::int64_t eager = engine.report().eager_calls;
  expect_plain(engine, 3, {32});
  EXPECT_EQ(engine.report().eager_calls, eager);
}

TEST_F(SharedShapesTest, ABoundThatIsTooSmallIsNamedInTheReport) {
  OffloadEngine engine(model_, options(sharing().max_captures(2).on_max_captures(OnMaxCaptures::drop_least_used)));
  const auto note = [&] {
    std::string found;
    for (const std::string& text : engine.report().notes) {
      found += text.find("CallOptions::max_captures") == std::string::npos ? "" : text;
    }
    return found;
  };
  std::int64_t s = 0;
  for (const std::int64_t length : {8, 8, 16, 16, 24, 24, 8, 8}) {
    expect_plain(engine, s++, {length});
  }
  EXPECT_EQ(note(), "") << "each call dropped two captures, and may have two";
  expect_plain(engine, s++, {16});
  expect_plain(engine, s++, {16});
  EXPECT_PRED_FORMAT2(testing::IsSubstring,
                      "\"layers.0\" and 2 other calls dropped captures 9 times to make room for new ones, and "
                      "CallOptions::max_captures is 2",
                      note());
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "raise max_captures", note());
}

TEST_F(SharedShapesTest, MoreThanTheBoundAreRefusedByOption) {
  OffloadEngine engine(model_, options(sharing().max_captures(1).on_max_captures(OnMaxCaptures::error)));
  expect_plain(engine, 0, {32});
  expect_plain(engine, 1, {32});
  {
    auto step = engine.step();
    EXPECT_THROWS(UsageError, "needs more than the 1 captures that CallOptions::max_captures allows",
                  (void)model_.forward(data(3, 16)));
    step.finish();
  }
  expect_plain(engine, 4, {32});
}

}  // namespace
}  // namespace sidestream::testing_model
