#include "analysis/sequence_order.h"

#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "sidestream/error.h"
#include "tests/expect_throws.h"
#include "tests/unit/analysis/pipeline_orders.h"

namespace sidestream {
namespace {

constexpr Direction kForward = Direction::forward;
constexpr Direction kBackward = Direction::backward;
constexpr Direction kWeights = Direction::weights;

/// F0 F1 B0 B1 W0 F2 W1 B2, and W2 at the end.
SequenceOrder with_weights() {
  return SequenceOrder({{0, 0, kForward},
                        {0, 1, kForward},
                        {0, 0, kBackward},
                        {0, 1, kBackward},
                        {0, 0, kWeights},
                        {0, 2, kForward},
                        {0, 1, kWeights},
                        {0, 2, kBackward}});
}

TEST(SequenceOrderTest, NestedIsForwardsAndThenBackwardsInReverse) {
  const SequenceOrder order = nested_order(3);
  EXPECT_EQ(order.steps(), (std::vector<SequenceStep>{{0, 0, kForward},
                                                      {1, 0, kForward},
                                                      {2, 0, kForward},
                                                      {2, 0, kBackward},
                                                      {1, 0, kBackward},
                                                      {0, 0, kBackward}}));
  EXPECT_EQ(order.runs(), 3U);
  for (std::size_t run = 0; run < 3; ++run) {
    EXPECT_EQ(order.forward_index(run), run);
    EXPECT_EQ(order.backward_index(run), 5 - run);
    EXPECT_EQ(order.backward_rank(run), 2 - run);
    EXPECT_EQ(order.run_at(run), run);
    EXPECT_EQ(order.run_at(5 - run), run);
    EXPECT_EQ(order.first_run_from(run), run);
  }
  EXPECT_EQ(order.first_run_from(3), 3U) << "no forward follows a backward";
  EXPECT_EQ(nested_order(0).size(), 0U);
}

TEST(SequenceOrderTest, OneForwardOneBackwardHasARunForEachMicrobatch) {
  const SequenceOrder order = one_forward_one_backward(/*calls=*/2, /*warm_up=*/1, /*microbatches=*/3);
  // F0a F0b F1a F1b B0b B0a F2a F2b B1b B1a B2b B2a
  EXPECT_EQ(order.size(), 12U);
  EXPECT_EQ(order.runs(), 6U);
  EXPECT_EQ(order.forward_index(4), 6U) << "the first call for the third microbatch";
  EXPECT_EQ(order.backward_index(0), 5U);
  EXPECT_EQ(order.backward_index(4), 11U);
  EXPECT_EQ(order.by_backward(), (std::vector<std::size_t>{1, 0, 3, 2, 5, 4}));
  EXPECT_EQ(order.first_run_from(4), 4U);
  EXPECT_EQ(order.first_run_from(7), 5U);
  EXPECT_EQ(order.first_run_from(8), 6U);
}

TEST(SequenceOrderTest, WithoutDroppedRunsTheRestKeepsItsOrder) {
  const SequenceOrder order = one_forward_one_backward(/*calls=*/2, /*warm_up=*/1, /*microbatches=*/2);
  // F0a F0b F1a F1b B0b B0a B1b B1a
  EXPECT_EQ(order.without({true, false, false, true}).steps(),
            (std::vector<SequenceStep>{{0, 0, kForward}, {1, 0, kForward}, {0, 0, kBackward}, {1, 0, kBackward}}));
  EXPECT_EQ(order.without({true, true, true, true}).size(), 0U);
}

TEST(SequenceOrderTest, WeightsGraphsHaveNoIndexButComeBeforeOne) {
  const SequenceOrder order = with_weights();
  EXPECT_EQ(order.size(), 6U);
  EXPECT_EQ(order.weights_index(0), 4U);
  EXPECT_EQ(order.weights_index(1), 5U);
  EXPECT_EQ(order.weights_index(2), 6U) << "its step is missing";
  EXPECT_EQ(order.by_weights(), (std::vector<std::size_t>{0, 1, 2}));
  EXPECT_EQ(nested_order(2).by_weights(), (std::vector<std::size_t>{1, 0})) << "as the backwards";
  EXPECT_EQ(nested_order(2).weights_rank(0), 1U);
  EXPECT_EQ(nested_order(2).weights_index(0), 4U);
}

TEST(SequenceOrderTest, WithoutDroppedRunsWeightsGraphsStayBetweenTheSameGraphs) {
  const SequenceOrder order = with_weights().without({true, false, false});  // F1 B1 F2 W1 B2
  EXPECT_EQ(order.size(), 4U);
  EXPECT_EQ(order.weights_index(0), 3U);
  EXPECT_EQ(order.weights_index(1), 4U);
  EXPECT_EQ(with_weights().without({false, true, true}).weights_index(0), 2U);
}

TEST(SequenceOrderTest, InterleavesIfAForwardFollowsABackward) {
  EXPECT_FALSE(nested_order(0).interleaves());
  EXPECT_FALSE(nested_order(3).interleaves());
  EXPECT_FALSE(one_forward_one_backward(2, 1, 2).interleaves());
  EXPECT_TRUE(one_forward_one_backward(2, 1, 3).interleaves());
}

TEST(SequenceOrderTest, InterleavedRunsEachStageForEachMicrobatchOnce) {
  const SequenceOrder order = interleaved(/*ranks=*/2, /*stages=*/2, /*microbatches=*/4);
  EXPECT_EQ(order.size(), 16U);
  EXPECT_EQ(order.runs(), 8U);
  const std::vector<SequenceStep> begin(order.steps().begin(), order.steps().begin() + 6);
  EXPECT_EQ(begin, (std::vector<SequenceStep>{{0, 0, kForward},
                                              {0, 1, kForward},
                                              {1, 0, kForward},
                                              {1, 1, kForward},
                                              {0, 2, kForward},
                                              {1, 0, kBackward}}));
}

TEST(SequenceOrderTest, RefusesListsThatAreNoOrder) {
  using Steps = std::vector<SequenceStep>;
  EXPECT_THROWS(UsageError, "the backward of call 0 for microbatch 0 without a forward",
                SequenceOrder(Steps{{0, 0, kBackward}}));
  EXPECT_THROWS(UsageError, "lacks the backward of call 2 for microbatch 1", SequenceOrder(Steps{{2, 1, kForward}}));
  EXPECT_THROWS(UsageError, "the forward of call 0 for microbatch 0 twice",
                SequenceOrder(Steps{{0, 0, kForward}, {0, 0, kForward}}));
  EXPECT_THROWS(UsageError, "the backward of call 0 for microbatch 0 twice",
                SequenceOrder(Steps{{0, 0, kForward}, {0, 0, kBackward}, {0, 0, kBackward}}));
  EXPECT_THROWS(UsageError, "the weight gradients of call 0 for microbatch 0 without a forward",
                SequenceOrder(Steps{{0, 0, kWeights}}));
  EXPECT_THROWS(UsageError, "the weight gradients of call 0 for microbatch 0 without a backward",
                SequenceOrder(Steps{{0, 0, kForward}, {0, 0, kWeights}, {0, 0, kBackward}}));
  EXPECT_THROWS(UsageError, "the weight gradients of call 0 for microbatch 0 twice",
                SequenceOrder(Steps{{0, 0, kForward}, {0, 0, kBackward}, {0, 0, kWeights}, {0, 0, kWeights}}));
}

/// What forbids the graph at each index of `order` while `pending` runs are among `runs`: -1 if nothing does.
std::vector<int> obstacles(const SequenceOrder& order, PendingRuns runs, const std::vector<std::size_t>& pending) {
  for (const std::size_t run : pending) {
    runs.begin(run);
  }
  std::vector<int> found;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::optional<std::size_t> obstacle = runs.obstacle(i);
    found.push_back(obstacle ? static_cast<int>(*obstacle) : -1);
  }
  return found;
}

/// While they await their backward.
std::vector<int> obstacles(const SequenceOrder& order, const std::vector<std::size_t>& pending) {
  return obstacles(order, PendingRuns(order), pending);
}

TEST(PendingRunsTest, APendingRunAllowsWhatLiesBetweenItsForwardAndItsBackward) {
  EXPECT_EQ(obstacles(nested_order(3), {}), (std::vector<int>{-1, -1, -1, -1, -1, -1}));
  EXPECT_EQ(obstacles(nested_order(3), {1}), (std::vector<int>{1, 1, -1, -1, -1, 1}));
  EXPECT_EQ(obstacles(nested_order(3), {0, 2}), (std::vector<int>{2, 2, 2, -1, 2, 2}));
  // F0 F1 B0 F2 B1 B2
  const SequenceOrder order = one_forward_one_backward(1, 1, 3);
  EXPECT_EQ(obstacles(order, {0}), (std::vector<int>{0, -1, -1, 0, 0, 0}));
  EXPECT_EQ(obstacles(order, {0, 1}), (std::vector<int>{1, 1, -1, 0, 0, 0}));
  EXPECT_EQ(obstacles(order, {1}), (std::vector<int>{1, 1, -1, -1, -1, 1}));
  EXPECT_EQ(obstacles(order, {1, 2}), (std::vector<int>{2, 2, 2, 2, -1, 1}));
}

TEST(PendingRunsTest, ARunThatAwaitsItsWeightsGraphAllowsWhatLiesBetweenItsBackwardAndThatGraph) {
  const SequenceOrder order = with_weights();
  const auto pending = [&](const std::vector<std::size_t>& runs) {
    return obstacles(order, PendingRuns::of_weights(order), runs);
  };
  EXPECT_EQ(pending({0}), (std::vector<int>{0, 0, 0, -1, 0, 0}));
  EXPECT_EQ(pending({1}), (std::vector<int>{1, 1, 1, 1, -1, 1}));
  EXPECT_EQ(pending({0, 1}), (std::vector<int>{1, 1, 1, 1, 0, 0}));
  EXPECT_EQ(pending({2}), (std::vector<int>{2, 2, 2, 2, 2, 2}));
  const SequenceOrder nested = nested_order(2);
  EXPECT_EQ(obstacles(nested, PendingRuns::of_weights(nested), {1}), (std::vector<int>{1, 1, 1, -1}));
}

TEST(PendingRunsTest, EveryOrderMayRepeatItself) {
  const std::vector<SequenceOrder> orders = {nested_order(5), one_forward_one_backward(3, 2, 6), interleaved(4, 2, 8),
                                             forwards_first_in_order(2, 3)};
  for (std::size_t number = 0; number < orders.size(); ++number) {
    SCOPED_TRACE("order " + std::to_string(number));
    const SequenceOrder& order = orders[number];
    PendingRuns pending(order);
    for (int pass = 0; pass < 2; ++pass) {
      for (std::size_t i = 0; i < order.size(); ++i) {
        EXPECT_FALSE(pending.obstacle(i)) << "graph " << i;
        const std::size_t run = order.run_at(i);
        if (order.is_backward(i)) {
          pending.end(run);
        } else {
          pending.begin(run);
        }
        EXPECT_EQ(pending.contains(run), !order.is_backward(i));
      }
      EXPECT_TRUE(pending.empty());
    }
  }
}

TEST(PendingRunsTest, EndsInAnyOrder) {
  const SequenceOrder order = nested_order(4);
  PendingRuns pending(order);
  for (std::size_t run = 0; run < 4; ++run) {
    pending.begin(run);
  }
  pending.end(2);
  EXPECT_EQ(pending.latest(), 3U);
  pending.end(3);
  EXPECT_EQ(pending.latest(), 1U);
  EXPECT_FALSE(pending.obstacle(order.backward_index(1)));
  EXPECT_EQ(pending.obstacle(order.backward_index(0)), std::optional<std::size_t>(1));
  pending.end(0);
  pending.end(0);  // ended before
  EXPECT_EQ(pending.latest(), 1U);
  EXPECT_FALSE(pending.obstacle(order.forward_index(2)));
  pending.end(1);
  EXPECT_TRUE(pending.empty());
}

}  // namespace
}  // namespace sidestream
