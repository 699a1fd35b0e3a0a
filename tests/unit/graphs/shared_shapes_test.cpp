// Captures of several shapes that share device memory: the same cases for calls by ss::call and for bucketed callables.
#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "graphs/engine/engine_access.h"
#include "models/body_model.h"
#include "models/plain_twin.h"
#include "sidestream/bucketed_callables.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/testing/simulator.h"
#include "unit/graphs/called_stack.h"
#include "warnings.h"

namespace sidestream::testing_model {
namespace {

enum class ShapesOf : std::uint8_t { calls, buckets };

/// Options that calls and buckets have under different names.
struct ShapeRules {
  std::int64_t max_captures = 8;
  OnMaxCaptures on_max_captures = OnMaxCaptures::drop_least_used;
  bool captures_new = true;      ///< else new shapes run eagerly
  bool refuses_pending = false;  ///< else a call beside a pending one runs eagerly
};

/// Layers that are called with several lengths, beside their plain twin.
class SeveralShapes : public testing::Test {
 protected:
  static constexpr std::int64_t kLayers = 4;            // so many that some leave
  static constexpr std::int64_t kGraphs = 2 * kLayers;  ///< of one shape

  explicit SeveralShapes(ShapesOf way) : way_(way) {}
  ~SeveralShapes() override { set_schedule(device_, Schedule()); }

  /// A new engine. The shape with `length` rows is captured.
  void begin(const ShapeRules& rules = {}, std::int64_t length = 32) {
    buckets_.clear();
    engine_.reset();
    if (way_ == ShapesOf::calls) {
      begin_calls(CallOptions()
                      .share_memory(true)
                      .max_captures(rules.max_captures)
                      .on_max_captures(rules.on_max_captures)
                      .on_pending(rules.refuses_pending ? OnPending::error : OnPending::capture)
                      .on_new_arguments(rules.captures_new ? OnNewArguments::capture : OnNewArguments::eager));
      expect_plain_steps({length});
    } else {
      engine_.emplace(model_, options());
      capture_bucket(length,
                     BucketOptions()
                         .max_buckets(rules.max_captures)
                         .on_max_buckets(rules.on_max_captures)
                         .on_pending(rules.refuses_pending ? OnPendingBucket::error : OnPendingBucket::eager)
                         .on_unknown_shape(rules.captures_new ? OnUnknownShape::capture : OnUnknownShape::eager));
    }
    expect_plain_steps({length});
    captures_before_ = engine_->report().captures;
    (void)eager();
  }
  /// A new engine for calls with these options. Nothing is captured yet.
  void begin_calls(const CallOptions& options) {
    engine_.emplace(model_, this->options().graph("layers.*").call_options(options));
  }

  [[nodiscard]] Options options() const { return Options(device_).min_bytes(1024).offload("layers.*.*"); }
  [[nodiscard]] at::Tensor data(std::int64_t s, std::int64_t length, std::int64_t salt = 0) const {
    return at::cat({rows(s, device_, salt), rows(s, device_, salt + 7), rows(s, device_, salt + 8)})
        .narrow(0, 0, length)
        .clone();
  }
  /// The output for an input of `length` rows, by the captures or plainly.
  at::Tensor forward(CalledStack& model, std::int64_t s, std::int64_t length, std::int64_t salt = 0) {
    at::Tensor h = data(s, length, salt).requires_grad_(true);
    if (&model != &model_ || way_ == ShapesOf::calls) {
      return model.forward(h);
    }
    for (const GraphedCallable& bucket : buckets_) {
      h = bucket({h})[0];
    }
    return h;
  }
  /// Runs in a step, where the way has steps.
  [[nodiscard]] OffloadEngine* steps() { return way_ == ShapesOf::calls ? &*engine_ : nullptr; }
  void expect_plain_step(const std::function<void(CalledStack& model)>& act) {
    expect_same_step(model_, steps(), plain_, step_++, act);
  }
  /// A step whose microbatches have these lengths, one after the other.
  void expect_plain(const std::vector<std::int64_t>& lengths) {
    expect_plain_step([&, s = step_](CalledStack& model) {
      for (std::size_t i = 0; i < lengths.size(); ++i) {
        const std::int64_t number = 50 * s + static_cast<std::int64_t>(i);
        (forward(model, number, lengths[i]) * data(number, lengths[i], 1)).mean().backward();
      }
    });
  }
  /// Steps of one microbatch.
  void expect_plain_steps(const std::vector<std::int64_t>& lengths) {
    for (const std::int64_t length : lengths) {
      expect_plain({length});
    }
  }
  /// A step of all forwards, then their backwards in the opposite order.
  void expect_plain_in_flight(const std::vector<std::int64_t>& lengths) {
    expect_plain_step([&, s = step_](CalledStack& model) {
      std::vector<at::Tensor> losses;
      for (const std::int64_t length : lengths) {
        losses.push_back(forward(model, s, length, static_cast<std::int64_t>(losses.size())).mean());
      }
      for (auto loss = losses.rbegin(); loss != losses.rend(); ++loss) {
        loss->backward();
      }
    });
  }
  /// Shapes that were captured since `begin`.
  [[nodiscard]] std::int64_t captured() const { return (engine_->report().captures - captures_before_) / kGraphs; }
  /// Calls that ran eagerly since this was last asked.
  [[nodiscard]] std::int64_t eager() {
    const std::int64_t now = engine_->report().eager_calls;
    return now - std::exchange(eager_before_, now);
  }
  /// Pinned bytes that captures hold.
  [[nodiscard]] std::size_t leased() const { return EngineAccess::state(*engine_).arena().stats().leased; }
  /// The notes in which `text` stands.
  [[nodiscard]] std::string notes_with(const std::string& text) const {
    std::string found;
    for (const std::string& note : engine_->report().notes) {
      found += note.find(text) == std::string::npos ? "" : note;
    }
    return found;
  }
  /// One of two texts.
  [[nodiscard]] const char* text(const char* of_calls, const char* of_buckets) const {
    return way_ == ShapesOf::calls ? of_calls : of_buckets;
  }

  const ShapesOf way_;
  c10::Device device_ = find_device("sim");
  CalledStack model_{device_, {}, kLayers};
  CalledStack plain_{device_, {}, kLayers};
  std::optional<OffloadEngine> engine_;
  std::vector<GraphedCallable> buckets_;
  std::int64_t step_ = 0;

 private:
  void capture_bucket(std::int64_t length, const BucketOptions& options) {
    std::vector<Callable> callables;
    std::vector<std::vector<Sample>> bucket;
    for (const torch::nn::AnyModule& layer : *model_.layers) {
      const auto i = static_cast<std::int64_t>(callables.size());
      bucket.push_back({i == 0 ? Sample(data(0, length).requires_grad_(true)) : Sample::output_of(i - 1)});
      callables.emplace_back("layers." + std::to_string(i), layer);
    }
    buckets_ = make_bucketed_callables(*engine_, callables, {bucket}, options);
  }

  std::int64_t captures_before_ = 0;
  std::int64_t eager_before_ = 0;
};

class SharedShapesTest : public SeveralShapes, public testing::WithParamInterface<ShapesOf> {
 protected:
  SharedShapesTest() : SeveralShapes(GetParam()) {}
};

INSTANTIATE_TEST_SUITE_P(Ways, SharedShapesTest, testing::Values(ShapesOf::calls, ShapesOf::buckets),
                         [](const auto& info) { return info.param == ShapesOf::calls ? "calls" : "buckets"; });

TEST_P(SharedShapesTest, StepsOfAnyLengthGiveThePlainGradients) {
  for (const char* schedule : {"early", "late", "d2h-early", "d2h-late", "seed:1", "seed:2", "seed:3"}) {
    SCOPED_TRACE(schedule);
    set_schedule(device_, Schedule::parse(schedule));
    begin();
    expect_plain_steps({8, 20, 8, 32, 20, 20, 32, 8, 20});
    EXPECT_EQ(captured(), 2);
    EXPECT_GT(leased(), 0U);
  }
}

TEST_P(SharedShapesTest, ANewShapeIsCapturedBehindOneEagerPass) {
  const ExpectedWarnings warnings;
  begin();
  expect_plain_steps({12});
  EXPECT_EQ(eager(), kLayers);
  EXPECT_EQ(captured(), 0);
  expect_plain_steps({12});
  EXPECT_EQ(captured(), 1);
  expect_plain_steps({32, 12, 32, 12});
  EXPECT_EQ(eager(), 0);
  EXPECT_EQ(captured(), 1);
}

TEST_P(SharedShapesTest, ShapesByTurnsAreAllCaptured) {
  begin();
  expect_plain_steps({12, 40, 20, 12, 40, 20, 12, 40, 20, 8});
  EXPECT_EQ(captured(), 3);
}

TEST_P(SharedShapesTest, MicrobatchesOfSeveralLengthsGiveThePlainGradients) {
  begin();
  for (std::int64_t s = 0; s < 6; ++s) {
    expect_plain({32, 8 + 4 * (s % 3), 32});
  }
  EXPECT_EQ(captured(), 3);
}

TEST_P(SharedShapesTest, MicrobatchesInFlightGiveThePlainGradients) {
  begin();
  for (int i = 0; i < 4; ++i) {
    expect_plain_in_flight({12, 32, 12, 40});
  }
  EXPECT_GE(captured(), 1);
}

TEST_P(SharedShapesTest, ACallBesideAPendingOneRunsEagerly) {
  begin();
  expect_plain_steps({16, 16, 32});
  (void)eager();
  expect_plain_in_flight({32, 16});
  EXPECT_EQ(eager(), kLayers);
}

TEST_P(SharedShapesTest, ACallBesideAPendingOneIsRefusedByOption) {
  begin({.refuses_pending = true});
  expect_plain_steps({16, 16});
  in_step(steps(), [&] {
    const at::Tensor y = forward(model_, 3, 32);
    EXPECT_THROWS(UsageError, "which shares its memory, is still pending", (void)forward(model_, 3, 16));
    y.mean().backward();
  });
  expect_plain_steps({16});
}

TEST_P(SharedShapesTest, NewShapesRunEagerlyWithOneWarning) {
  begin({.captures_new = false});
  ExpectedWarnings warnings;
  expect_plain_steps({16, 20});
  const std::vector<std::string> texts = warnings.take();
  ASSERT_EQ(texts.size(), static_cast<std::size_t>(kLayers));
  EXPECT_PRED_FORMAT2(testing::IsSubstring,
                      text("graphed call \"layers.0\" runs eagerly: its arguments match none",
                           "bucketed call \"layers.0\" runs eagerly: its inputs fit none of the 1 buckets"),
                      texts[0]);
  EXPECT_EQ(captured(), 0);
}

TEST_P(SharedShapesTest, TheLeastRecentlyUsedMakesRoom) {
  begin({.max_captures = 2});
  expect_plain_steps({16, 16, 32});
  EXPECT_EQ(captured(), 1);
  const std::size_t before = leased();
  expect_plain_steps({20, 20});  // in the place of 16
  EXPECT_EQ(captured(), 2);
  EXPECT_EQ(leased(), before) << "what 32 needs";
  (void)eager();
  expect_plain_steps({32, 20});
  EXPECT_EQ(eager(), 0) << "both are there";
  expect_plain_steps({16});
  EXPECT_EQ(eager(), kLayers) << "it was dropped";
}

TEST_P(SharedShapesTest, PinnedMemoryIsWhatTheLargestNeeds) {
  const auto leased_by = [&](const std::vector<std::int64_t>& lengths) {
    begin({}, lengths[0]);
    for (const std::int64_t length : lengths) {
      expect_plain_steps({length, length});
    }
    expect_plain_steps(lengths);
    return leased();
  };
  const std::size_t largest = leased_by({32});
  EXPECT_GT(largest, 0U);
  EXPECT_EQ(largest, 4 * leased_by({8}));
  EXPECT_EQ(leased_by({32, 20, 8}), largest);
  EXPECT_EQ(leased_by({8, 20, 32}), largest);
  EXPECT_EQ(leased_by({20, 12, 32, 28}), largest);
}

TEST_P(SharedShapesTest, ADroppedCaptureGivesBackThePinnedMemoryThatTheOthersDoNotNeed) {
  begin({.max_captures = 1}, 8);
  const std::size_t small = leased();
  expect_plain_steps({32, 32});
  EXPECT_EQ(leased(), 4 * small);
  expect_plain_steps({8, 8});
  EXPECT_EQ(leased(), small);
}

TEST_P(SharedShapesTest, OutputsOfADroppedCaptureKeepTheirValues) {
  begin({.max_captures = 1});
  at::Tensor held;
  in_step(steps(), [&] { held = forward(model_, 0, 32).detach(); });
  const at::Tensor before = held.cpu().clone();
  expect_plain_steps({8, 8, 40, 40});
  EXPECT_EQ(captured(), 2);
  EXPECT_TRUE(at::equal(held.cpu(), before));
}

TEST_P(SharedShapesTest, ABoundThatIsTooSmallIsNamedInTheReport) {
  begin({.max_captures = 2}, 8);
  const char* const option = text("CallOptions::max_captures", "BucketOptions::max_buckets");
  expect_plain_steps({16, 16, 24, 24, 8, 8});
  EXPECT_EQ(notes_with(option), "") << "two were dropped, and there may be two";
  expect_plain_steps({16, 16});
  EXPECT_PRED_FORMAT2(testing::IsSubstring,
                      text("\"layers.0\" and 3 other calls dropped captures 12 times to make room for new ones, and "
                           "CallOptions::max_captures is 2",
                           "the buckets of \"layers.0\" were dropped 3 times to make room for new ones, and "
                           "BucketOptions::max_buckets is 2"),
                      notes_with(option));
  EXPECT_PRED_FORMAT2(testing::IsSubstring, text("raise max_captures", "raise max_buckets"), notes_with(option));
}

TEST_P(SharedShapesTest, MoreThanTheBoundAreRefusedByOption) {
  begin({.max_captures = 1, .on_max_captures = OnMaxCaptures::error});
  in_step(steps(), [&] {
    EXPECT_THROWS(UsageError,
                  text("needs more than the 1 captures that CallOptions::max_captures allows",
                       "BucketOptions::max_buckets allows no more"),
                  (void)forward(model_, 3, 16));
  });
  expect_plain_steps({32});
}

/// What calls alone do: microbatches in flight have captures of their own, and each call has its own captures.
class SharedShapesOfCallsTest : public SeveralShapes {
 protected:
  SharedShapesOfCallsTest() : SeveralShapes(ShapesOf::calls) {}
};

// A capture for microbatches in flight, of another memory.
TEST_F(SharedShapesOfCallsTest, ACallBesideAPendingOneReplaysWhereACaptureOfItIsFree) {
  begin_calls(CallOptions().share_memory(true));
  expect_plain_in_flight({32, 32});  // two captures of this length
  expect_plain_in_flight({32, 32});
  expect_plain_steps({16, 16});  // and one of this, in the memory of the first of them
  (void)eager();
  expect_plain_in_flight({16, 32});
  EXPECT_EQ(eager(), 0);
}

TEST_F(SharedShapesOfCallsTest, AForwardBesideAPendingOneOfItsShapeRunsEagerlyByOption) {
  begin_calls(CallOptions().on_pending(OnPending::eager));
  expect_plain_steps({32, 32});
  (void)eager();
  expect_plain_in_flight({32, 32});
  EXPECT_EQ(eager(), kLayers);
  expect_plain_steps({32});
}

TEST_F(SharedShapesOfCallsTest, ACaptureThatNobodyReplayedYetIsTheLatest) {
  begin({.max_captures = 2});
  expect_plain_steps({16, 20});  // 20 takes the place of 32
  (void)eager();
  expect_plain_steps({16, 20});
  EXPECT_EQ(eager(), 0);
}

TEST_F(SharedShapesOfCallsTest, AStepThatFailsDropsNothing) {
  begin({.max_captures = 1});
  EXPECT_THROW(in_step(steps(),
                       [&] {
                         (void)forward(model_, 2, 16);
                         throw std::runtime_error("of the trainer");
                       }),
               std::runtime_error);
  (void)eager();
  expect_plain_steps({32});
  EXPECT_EQ(eager(), 0);
}

TEST_F(SharedShapesOfCallsTest, CallsOfRelocatedWeightsRunEagerlyWhileTheirMemoryAwaitsABackward) {
  begin();
  expect_plain_steps({16, 16});
  at::Tensor kept;  // its backward never comes
  in_step(steps(), [&] { kept = forward(model_, 0, 32).mean(); });
  relocate(model_);
  (void)eager();
  expect_plain_steps({16, 32});
  EXPECT_EQ(eager(), 2 * kLayers);
  kept.reset();
  expect_plain_steps({16, 32});
  EXPECT_EQ(eager(), 0);
}

TEST_F(SharedShapesOfCallsTest, WhatOtherCallsCapturedBesideADroppedOneStays) {
  begin_calls(CallOptions().max_captures(1).on_max_captures(OnMaxCaptures::drop_least_used));
  // The last layer sees one shape, whatever the others do.
  const auto two_steps = [&](std::int64_t length) {
    for (int i = 0; i < 2; ++i) {
      expect_plain_step([&, s = step_](CalledStack& model) {
        const at::Tensor h = model.run_layer(1, model.run_layer(0, data(s, length).requires_grad_(true)));
        (model.run_layer(2, h.narrow(0, 0, 8).clone()).mean() + h.mean()).backward();
      });
    }
  };
  two_steps(32);
  EXPECT_EQ(engine_->report().captures, 6);
  (void)eager();
  two_steps(16);
  EXPECT_EQ(engine_->report().captures, 10) << "of the two whose shape changed";
  EXPECT_EQ(eager(), 2) << "of the same, once";
  // What is left of both is captured again where its weights lie then.
  relocate(model_);
  two_steps(16);
  EXPECT_EQ(engine_->report().recaptures, 2 + 3) << "for the other shape, and of all";
  EXPECT_EQ(eager(), 0);
}

// The backward of a max-pooling writes to the places that the forward saved. A wrong place is outside of the gradient.
TEST(SharedShapesOfPoolingTest, ANewShapeBesideReplayedOnesGivesThePlainGradients) {
  const c10::Device device = find_device("sim");
  const auto pooled = [](BodyBlock& block, const at::Tensor& x) {
    const at::Tensor largest = at::max_pool1d(at::matmul(x, block.weight).tanh(), 2);
    return at::cat({largest, largest}, -1);
  };
  BodyTwins twins(device, {pooled, pooled});
  OffloadEngine engine(twins.mine, Options(device).graph("blocks.*").call_options(CallOptions().share_memory(true)));
  twins.expect_plain(engine, 0, 3, 32);
  for (std::int64_t s = 3; s < 12; ++s) {
    twins.expect_plain(engine, s, s + 1, s % 2 == 0 ? 32 : 28 - s % 3);
  }
  EXPECT_GT(engine.report().captures, 8);
}

}  // namespace
}  // namespace sidestream::testing_model
