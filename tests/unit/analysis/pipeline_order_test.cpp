#include "sidestream/pipeline_order.h"

#include <algorithm>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "sidestream/error.h"
#include "tests/expect_throws.h"

namespace sidestream {
namespace {

using Kind = PipelineStep::Kind;
using Order = std::vector<PipelineStep>;

Order order_of(const PipelineShape& shape, std::int64_t rank) { return pipeline_order(shape, rank); }

std::vector<Order> all_orders(const PipelineShape& shape) {
  std::vector<Order> orders;
  for (std::int64_t rank = 0; rank < shape.ranks; ++rank) {
    orders.push_back(pipeline_order(shape, rank));
  }
  return orders;
}

/// "Fa0 Bb1 Wa2": the work, the virtual stage as a letter, the microbatch.
std::string words_of(const Order& order) {
  std::string words;
  for (const PipelineStep& step : order) {
    words += words.empty() ? "" : " ";
    words += "FBW"[static_cast<int>(step.kind)];
    words += static_cast<char>('a' + step.stage);
    words += std::to_string(step.microbatch);
  }
  return words;
}

std::int64_t length_of(const std::vector<Order>& orders) {
  std::int64_t length = 0;
  for (const std::vector<TimedStep>& times : pipeline_times(orders)) {
    length = std::max(length, times.back().end);
  }
  return length;
}

/// The most chunks of `order` whose forward has run, but not yet their `last` step.
std::int64_t most_in_flight(const Order& order, Kind last) {
  std::int64_t now = 0;
  std::int64_t most = 0;
  for (const PipelineStep& step : order) {
    now += step.kind == Kind::forward ? 1 : step.kind == last ? -1 : 0;
    most = std::max(most, now);
  }
  return most;
}

Order steps_of_kind(const Order& order, Kind kind) {
  Order found;
  for (PipelineStep step : order) {
    if (step.kind == kind) {
      step.kind = Kind::forward;  // so that chunks of two kinds can be compared
      found.push_back(step);
    }
  }
  return found;
}

std::string name_of(const PipelineShape& shape) {
  return std::to_string(shape.ranks) + " ranks, " + std::to_string(shape.stages) + " virtual stages, " +
         std::to_string(shape.microbatches) + " microbatches, groups of " + std::to_string(shape.group) +
         (shape.delay_weight_gradients ? ", delayed weight gradients" : "");
}

/// Calls `check` for pipelines of 1 to 4 ranks and of 8, with and without delayed weight gradients, if `group` gives a group.
template <class Group, class Check>
void for_each_shape(const Group& group, const Check& check) {
  for (const std::int64_t ranks : {1, 2, 3, 4, 8}) {
    for (std::int64_t stages = 1; stages <= 3; ++stages) {
      for (std::int64_t microbatches = 1; microbatches <= 12; ++microbatches) {
        for (const bool delay : {false, true}) {
          PipelineShape shape{ranks, stages, microbatches, 0, delay};
          shape.group = group(shape);
          SCOPED_TRACE(name_of(shape));
          check(shape);
        }
      }
    }
  }
}

std::int64_t chosen_group(const PipelineShape&) { return 0; }

TEST(PipelineOrderTest, EachChunkRunsOnce) {
  for_each_shape(chosen_group, [](const PipelineShape& shape) {
    for (const Order& order : all_orders(shape)) {
      std::map<std::pair<std::int64_t, std::int64_t>, std::vector<Kind>> chunks;
      for (const PipelineStep& step : order) {
        EXPECT_TRUE(step.stage >= 0 && step.stage < shape.stages);
        EXPECT_TRUE(step.microbatch >= 0 && step.microbatch < shape.microbatches);
        chunks[{step.stage, step.microbatch}].push_back(step.kind);
      }
      EXPECT_EQ(static_cast<std::int64_t>(chunks.size()), shape.stages * shape.microbatches);
      const std::vector<Kind> expected = shape.delay_weight_gradients
                                             ? std::vector<Kind>{Kind::forward, Kind::backward, Kind::weight_gradients}
                                             : std::vector<Kind>{Kind::forward, Kind::backward};
      for (const auto& [chunk, kinds] : chunks) {
        EXPECT_EQ(kinds, expected) << "in the order " << words_of(order);
      }
    }
  });
}

TEST(PipelineOrderTest, RanksNeverWaitForever) {
  for_each_shape(chosen_group, [](const PipelineShape& shape) { EXPECT_NO_THROW(length_of(all_orders(shape))); });
}

TEST(PipelineOrderTest, RanksNeverWaitForeverWithAnyGroupThatIsAllowed) {
  int allowed = 0;
  for (std::int64_t extra = 0; extra < 12; ++extra) {
    for_each_shape([extra](const PipelineShape& shape) { return shape.ranks + extra; },
                   [&](const PipelineShape& shape) {
                     std::vector<Order> orders;
                     try {
                       orders = all_orders(shape);
                     } catch (const UsageError&) {
                       const std::int64_t rest = shape.microbatches % shape.group;
                       EXPECT_TRUE(0 < rest && rest < shape.ranks && shape.group < shape.microbatches);
                       return;
                     }
                     ++allowed;
                     EXPECT_NO_THROW(length_of(orders));
                   });
  }
  EXPECT_GT(allowed, 3000);
}

TEST(PipelineOrderTest, OneForwardOneBackwardKeepsAChunkForEachRankAfterIt) {
  for_each_shape(chosen_group, [](const PipelineShape& shape) {
    for (std::int64_t rank = 0; rank < shape.ranks && shape.stages == 1; ++rank) {
      EXPECT_EQ(most_in_flight(order_of(shape, rank), Kind::backward), std::min(shape.ranks - rank, shape.microbatches))
          << "rank " << rank;
    }
  });
}

TEST(PipelineOrderTest, DelayedWeightGradientsKeepNoMoreThanRank0KeepsWithout) {
  for_each_shape(chosen_group, [](PipelineShape shape) {
    const std::vector<Order> orders = all_orders(shape);
    shape.delay_weight_gradients = false;
    const std::int64_t bound = most_in_flight(order_of(shape, 0), Kind::backward);
    for (const Order& order : orders) {
      const bool delayed = steps_of_kind(order, Kind::weight_gradients).size() > 0;
      EXPECT_LE(most_in_flight(order, delayed ? Kind::weight_gradients : Kind::backward), bound) << words_of(order);
    }
  });
}

TEST(PipelineOrderTest, WeightGradientsComeInTheOrderOfTheirBackwards) {
  for_each_shape(chosen_group, [](const PipelineShape& shape) {
    for (const Order& order : all_orders(shape)) {
      if (shape.delay_weight_gradients) {
        EXPECT_EQ(steps_of_kind(order, Kind::weight_gradients), steps_of_kind(order, Kind::backward))
            << words_of(order);
      }
    }
  });
}

TEST(PipelineOrderTest, RanksWaitAsLongAsTheFormulasSay) {
  for_each_shape(chosen_group, [](PipelineShape shape) {
    const std::int64_t work = 3 * shape.stages * shape.microbatches;
    const std::int64_t length = length_of(all_orders(shape));
    if (shape.delay_weight_gradients) {
      if (shape.stages == 1 && shape.microbatches >= shape.ranks) {
        EXPECT_EQ(length, work + (shape.ranks - 1)) << "(ranks - 1) * (forward + backward - weight gradients)";
      }
      shape.delay_weight_gradients = false;
      EXPECT_LE(length, length_of(all_orders(shape)));
    } else if (shape.stages == 1 || shape.microbatches % shape.ranks == 0) {
      EXPECT_EQ(length, work + 3 * (shape.ranks - 1)) << "(ranks - 1) * (forward + backward)";
    }
  });
}

TEST(PipelineOrderTest, KnownOrders) {
  EXPECT_EQ(words_of(order_of({4, 1, 5}, 1)), "Fa0 Fa1 Fa2 Ba0 Fa3 Ba1 Fa4 Ba2 Ba3 Ba4");
  EXPECT_EQ(words_of(order_of({4, 1, 3}, 3)), "Fa0 Ba0 Fa1 Ba1 Fa2 Ba2");
  EXPECT_EQ(words_of(order_of({2, 2, 4}, 0)), "Fa0 Fa1 Fb0 Fb1 Fa2 Bb0 Fa3 Bb1 Fb2 Ba0 Fb3 Ba1 Bb2 Bb3 Ba2 Ba3");
  EXPECT_EQ(words_of(order_of({2, 2, 5, 3}, 1)),
            "Fa0 Fa1 Fa2 Fb0 Bb0 Fb1 Bb1 Fb2 Bb2 Fa3 Ba0 Fa4 Ba1 Fb3 Ba2 Fb4 Bb3 Bb4 Ba3 Ba4")
      << "groups of three microbatches, then two";
  EXPECT_EQ(words_of(order_of({3, 1, 4, 0, true}, 1)), "Fa0 Fa1 Ba0 Fa2 Ba1 Wa0 Fa3 Ba2 Wa1 Ba3 Wa2 Wa3");
  EXPECT_EQ(words_of(order_of({3, 1, 4, 0, true}, 2)), "Fa0 Ba0 Fa1 Ba1 Fa2 Ba2 Wa0 Fa3 Ba3 Wa1 Wa2 Wa3");
  EXPECT_EQ(words_of(order_of({5, 1, 2, 0, true}, 2)), "Fa0 Fa1 Ba0 Wa0 Ba1 Wa1") << "the next backward comes later";
}

TEST(PipelineOrderTest, TheChosenGroupIsTheSmallestThatIsAllowed) {
  EXPECT_EQ(order_of({4, 2, 8}, 0), order_of({4, 2, 8, 4}, 0));
  EXPECT_EQ(order_of({4, 2, 9}, 0), order_of({4, 2, 9, 5}, 0));
  EXPECT_EQ(order_of({4, 2, 6}, 0), order_of({4, 2, 6, 6}, 0));
  EXPECT_EQ(order_of({4, 2, 2}, 0), order_of({4, 2, 2, 4}, 0));
}

TEST(PipelineOrderTest, RefusesOrdersThatAreNotDefined) {
  EXPECT_THROWS(UsageError, "a pipeline has 0 ranks; it must be 1 to", order_of({0, 1, 1}, 0));
  EXPECT_THROWS(UsageError, "a pipeline has -1 virtual stages on each rank", order_of({1, -1, 1}, 0));
  EXPECT_THROWS(UsageError, "a pipeline has 0 microbatches", order_of({1, 1, 0}, 0));
  EXPECT_THROWS(UsageError, "rank 4 is not one of the pipeline's ranks, 0 to 3", order_of({4, 1, 1}, 4));
  EXPECT_THROWS(UsageError, "rank -1 is not one", order_of({4, 1, 1}, -1));
  EXPECT_THROWS(UsageError, "of 9 microbatches on 4 ranks is not defined for groups of 4", order_of({4, 2, 9, 4}, 0));
  EXPECT_THROWS(UsageError, "use groups of 5", order_of({4, 2, 9, 4}, 0));
  EXPECT_THROWS(UsageError, "is not defined for groups of 3", order_of({4, 2, 9, 3}, 0));
  EXPECT_THROWS(UsageError, "is not defined for groups of -4", order_of({4, 2, 9, -4}, 0));
  EXPECT_THROWS(UsageError, "4096 ranks with 64 virtual stages each and 64 microbatches has too many chunks",
                order_of({4096, 64, 64}, 0));
  constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
  EXPECT_THROWS(UsageError, "it must be 1 to 1048576", order_of({kLargest, 1, 1}, 0));
  EXPECT_EQ(order_of({4, 2, 6, kLargest}, 3), order_of({4, 2, 6, 6}, 3)) << "there is one group";
}

TEST(PipelineTimesTest, EachStepBeginsWhenItsRankAndTheStepThatItNeedsAreDone) {
  const std::vector<std::vector<TimedStep>> times = pipeline_times(all_orders({2, 1, 2}));
  std::vector<std::vector<std::int64_t>> spans;
  for (const std::vector<TimedStep>& rank : times) {
    for (const TimedStep& timed : rank) {
      spans.push_back({timed.step.microbatch, timed.begin, timed.end});
    }
  }
  using Spans = std::vector<std::vector<std::int64_t>>;
  EXPECT_EQ(spans, (Spans{{0, 0, 1}, {1, 1, 2}, {0, 4, 6}, {1, 7, 9}, {0, 1, 2}, {0, 2, 4}, {1, 4, 5}, {1, 5, 7}}));
}

TEST(PipelineTimesTest, RefusesOrdersThatWaitForever) {
  EXPECT_THROWS(UsageError,
                "waits forever for the forward of microbatch 0 in virtual stage 0 of rank 0, which must run before the "
                "backward of microbatch 0 in virtual stage 0 of rank 0; change the order of the two",
                length_of({{{0, 0, Kind::backward}, {0, 0, Kind::forward}}}));
  EXPECT_THROWS(UsageError, "waits forever for the backward of microbatch 1 in virtual stage 0 of rank 1",
                length_of({{{0, 1, Kind::forward}, {0, 1, Kind::backward}}, {{0, 1, Kind::forward}}}));
  EXPECT_THROWS(UsageError, "which must run before the weight gradients of microbatch 0",
                length_of({{{0, 0, Kind::forward}, {0, 0, Kind::weight_gradients}}}));
  // Each rank alone is in order, but rank 0 needs a backward before its second forward, and rank 1 the second forward first.
  EXPECT_THROWS(UsageError, "waits forever for the backward of microbatch 0 in virtual stage 0 of rank 1",
                length_of({pipeline_order({1, 1, 2}, 0), pipeline_order({2, 1, 2}, 0)}));
}

TEST(PipelineTimesTest, RefusesAStepThatOccursTwice) {
  EXPECT_THROWS(UsageError, "the forward of microbatch 3 in virtual stage 0 of rank 0 twice; remove one",
                length_of({{{0, 3, Kind::forward}, {0, 3, Kind::forward}}}));
  Order order = pipeline_order({1, 1, 1, 0, true}, 0);
  order.push_back(order.back());
  EXPECT_THROWS(UsageError, "the weight gradients of microbatch 0 in virtual stage 0 of rank 0 twice",
                length_of({order}));
}

TEST(PipelineTimesTest, RefusesWeightGradientsThatNeverCome) {
  std::vector<Order> orders = all_orders({2, 1, 3, 0, true});
  orders[1].pop_back();
  EXPECT_THROWS(UsageError,
                "never computes the weight gradients of microbatch 2 in virtual stage 0 of rank 1, but delays others; "
                "add them as a step after their backward",
                length_of(orders));
  EXPECT_EQ(length_of({{{0, 0, Kind::forward}}}), 1) << "a forward needs no backward";
}

}  // namespace
}  // namespace sidestream
