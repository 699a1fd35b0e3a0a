#include "analysis/copy_places.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/unit/analysis/pipeline_orders.h"

namespace sidestream {
namespace {

using Bytes = std::vector<std::uint64_t>;

std::vector<std::size_t> released(const std::vector<CopyPlaces>& places) {
  std::vector<std::size_t> at;
  for (const CopyPlaces& layer : places) {
    at.push_back(layer.released_at);
  }
  return at;
}

std::vector<std::size_t> returns(const std::vector<CopyPlaces>& places) {
  std::vector<std::size_t> at;
  for (const CopyPlaces& layer : places) {
    at.push_back(layer.reload_at);
  }
  return at;
}

/// Which of four calls stay, as a list of 0 and 1.
std::vector<int> staying(const SequenceOrder& order, const Bytes& bytes, const CopyWindow& window) {
  const std::vector<bool> stay = needed_immediately(order, bytes, window);
  return {stay.begin(), stay.end()};
}

TEST(NeededImmediatelyTest, IsWhatTheLastCallsSaveWithinTheLag) {
  EXPECT_EQ(staying(nested_order(4), {10, 10, 10, 10}, {20, 0}), (std::vector<int>{0, 0, 1, 1}));
  EXPECT_EQ(staying(nested_order(4), {10, 10, 10, 10}, {29, 0}), (std::vector<int>{0, 0, 1, 1}));
  EXPECT_EQ(staying(nested_order(4), {10, 10, 10, 1}, {20, 0}), (std::vector<int>{0, 0, 1, 1}))
      << "11 bytes do, 21 would not";
  EXPECT_EQ(staying(nested_order(2), {10, 10}, {20, 0}), (std::vector<int>{1, 1}));
  EXPECT_EQ(staying(nested_order(3), {10, 0, 0}, {10, 0}), (std::vector<int>{1, 1, 1}));
}

TEST(NeededImmediatelyTest, CountsWhatOtherMicrobatchesSaveInBetween) {
  // Two microbatches in flight: between the forward and the backward of each the forward of the next one runs.
  const SequenceOrder order = one_forward_one_backward(/*calls=*/1, /*warm_up=*/1, /*microbatches=*/4);
  EXPECT_EQ(staying(order, Bytes(4, 10), {20, 0}), (std::vector<int>{1, 1, 1, 1}));
  EXPECT_EQ(staying(order, Bytes(4, 10), {19, 0}), (std::vector<int>{0, 0, 0, 1})) << "nothing follows the last one";
}

TEST(CopyPlacesTest, SourcesAreReleasedAsLateAsTheLagAllows) {
  EXPECT_EQ(released(copy_places(nested_order(4), {10, 10, 10, 10}, {10, 10, 10, 0}, {10, 0})),
            (std::vector<std::size_t>{1, 2, 3, 4}));
  EXPECT_EQ(released(copy_places(nested_order(4), {10, 10, 10, 10}, {10, 10, 0, 0}, {20, 0})),
            (std::vector<std::size_t>{2, 3, 4, 4}));
  EXPECT_EQ(released(copy_places(nested_order(4), {10, 30, 10, 10}, {10, 30, 0, 0}, {40, 0})),
            (std::vector<std::size_t>{2, 3, 4, 4}));
}

TEST(CopyPlacesTest, FewCallsTrailIfFewMay) {
  const CopyWindow one{40, 0, /*in_flight=*/1};
  EXPECT_EQ(released(copy_places(nested_order(5), Bytes(5, 10), {10, 10, 10, 10, 0}, one)),
            (std::vector<std::size_t>{2, 3, 4, 5, 5}));
  EXPECT_EQ(released(copy_places(nested_order(4), Bytes(4, 10), {10, 10, 10, 0}, {40, 0, 0})),
            (std::vector<std::size_t>{1, 2, 3, 4}));
  EXPECT_EQ(released(copy_places(nested_order(4), Bytes(4, 10), {10, 0, 10, 0}, {40, 0, 1})),
            (std::vector<std::size_t>{3, 4, 4, 4}))
      << "a call that stays has no copy under way";
  EXPECT_EQ(released(copy_places(nested_order(4), Bytes(4, 10), Bytes(4, 10), {10, 0, 3})),
            (std::vector<std::size_t>{1, 2, 3, 4}))
      << "the lag holds as well";
}

TEST(CopyPlacesTest, SourcesAreReleasedBeforeTheFirstBackward) {
  EXPECT_EQ(released(copy_places(nested_order(2), {10, 10}, {10, 10}, {100, 0})), (std::vector<std::size_t>{2, 2}));
}

TEST(CopyPlacesTest, TargetsAreAllocatedWithTheBackwardAboveAtTheLatest) {
  // Places of backwards: layer 3 at 4, 2 at 5, 1 at 6, 0 at 7.
  EXPECT_EQ(returns(copy_places(nested_order(4), {10, 10, 10, 10}, {10, 10, 10, 0}, {10, 0})),
            (std::vector<std::size_t>{6, 5, 4, 4}));
  EXPECT_EQ(returns(copy_places(nested_order(2), {10, 10}, {10, 10}, {10, 0})), (std::vector<std::size_t>{2, 2}))
      << "the last layer's with its own";
}

TEST(CopyPlacesTest, TargetsAreAllocatedAsEarlyAsTheMemoryOfTheLagAllows) {
  // Layers 2 and 3 stay: the backward of 3 must be over before there is room for layer 1.
  EXPECT_EQ(returns(copy_places(nested_order(4), {10, 10, 10, 10}, {10, 10, 0, 0}, {20, 0})),
            (std::vector<std::size_t>{6, 5, 4, 4}));
  EXPECT_EQ(returns(copy_places(nested_order(4), {10, 10, 10, 10}, {10, 10, 0, 0}, {20, 10})),
            (std::vector<std::size_t>{5, 4, 4, 4}));
  EXPECT_EQ(returns(copy_places(nested_order(4), {10, 10, 10, 10}, {10, 10, 0, 0}, {20, 20})),
            (std::vector<std::size_t>{4, 4, 4, 4}));
}

TEST(CopyPlacesTest, ALookaheadWithoutBoundHasRoomForAll) {
  const Bytes bytes{10, 10, 10, 10};
  const auto with = [&](std::uint64_t lookahead) {
    return returns(copy_places(nested_order(4), bytes, bytes, {10, lookahead}));
  };
  EXPECT_EQ(with(std::numeric_limits<std::uint64_t>::max()), with(1000));
  EXPECT_NE(with(1000), with(0));
}

TEST(CopyPlacesTest, WhatLeavesInPartNeedsRoomForThatPartOnly) {
  EXPECT_EQ(released(copy_places(nested_order(3), {5, 5, 10}, {5, 5, 0}, {15, 0})),
            (std::vector<std::size_t>{2, 3, 3}));
}

TEST(CopyPlacesTest, SourcesOfMicrobatchesAreReleasedBeforeTheNextBackward) {
  // F0 F1 B0 F2 B1 F3 B2 B3.
  const SequenceOrder order = one_forward_one_backward(1, 1, 4);
  EXPECT_EQ(released(copy_places(order, Bytes(4, 10), Bytes(4, 10), {100, 0})), (std::vector<std::size_t>{2, 2, 4, 6}));
  EXPECT_EQ(released(copy_places(order, Bytes(4, 10), Bytes(4, 10), {10, 0})), (std::vector<std::size_t>{1, 2, 4, 6}))
      << "there is room for what one forward saves";
}

TEST(CopyPlacesTest, TargetsOfMicrobatchesAreAllocatedOneBackwardBeforeIfTheirForwardHasRun) {
  // F0 F1 B0 F2 B1 F3 B2 B3.
  const SequenceOrder order = one_forward_one_backward(1, 1, 4);
  EXPECT_EQ(returns(copy_places(order, Bytes(4, 10), Bytes(4, 10), {20, 0})), (std::vector<std::size_t>{2, 2, 4, 6}));
}

TEST(CopyPlacesTest, TargetsOfTheFirstBackwardAreAllocatedTwoForwardsBeforeItIfTheyAreReleased) {
  // F0 F1 F2 B0 F3 B1 F4 B2 B3 B4.
  const SequenceOrder order = one_forward_one_backward(1, 2, 5);
  EXPECT_EQ(returns(copy_places(order, Bytes(5, 10), Bytes(5, 10), {10, 0})).front(), 1);
  EXPECT_EQ(returns(copy_places(order, Bytes(5, 10), Bytes(5, 10), {20, 0})).front(), 2) << "released at F2";
  EXPECT_EQ(returns(copy_places(order, Bytes(5, 10), Bytes(5, 10), {100, 0})).front(), 3) << "released before B0";
}

/// Device bytes of offloaded runs at each graph: a run's bytes are there from its forward until its sources are released, and from the
/// allocation of its targets until its backward.
std::uint64_t most_on_device(const SequenceOrder& order, const Bytes& bytes, const std::vector<CopyPlaces>& places) {
  std::uint64_t most = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    std::uint64_t now = 0;
    for (std::size_t run = 0; run < order.runs(); ++run) {
      const bool alive = i >= order.forward_index(run) && i <= order.backward_index(run);
      now += alive && (i < places[run].released_at || i >= places[run].reload_at) ? bytes[run] : 0;
    }
    most = std::max(most, now);
  }
  return most;
}

TEST(CopyPlacesTest, NothingComesBackBeforeAForwardThatFreesMoreThanItSaves) {
  const SequenceOrder order = one_forward_one_backward(3, 3, 4);
  Bytes bytes;
  for (std::size_t run = 0; run < order.runs(); ++run) {
    bytes.push_back(run % 3 == 2 ? 40 : 10);
  }
  EXPECT_EQ(most_on_device(order, bytes, copy_places(order, bytes, bytes, {80, 0})), 110);
}

TEST(CopyPlacesTest, FitIntoTheWindowInEachOrder) {
  const std::vector<SequenceOrder> orders = {nested_order(12), one_forward_one_backward(3, 2, 6),
                                             one_forward_one_backward(2, 0, 4), interleaved(2, 2, 8),
                                             forwards_first_in_order(3, 4)};
  for (std::size_t number = 0; number < orders.size(); ++number) {
    SCOPED_TRACE("order " + std::to_string(number));
    const SequenceOrder& order = orders[number];
    Bytes bytes;
    for (std::size_t run = 0; run < order.runs(); ++run) {
      bytes.push_back(10 + run % 3 * 5);
    }
    for (const CopyWindow window :
         {CopyWindow{20, 0}, CopyWindow{60, 0}, CopyWindow{40, 30}, CopyWindow{60, 0, 0}, CopyWindow{60, 0, 1}}) {
      const std::vector<CopyPlaces> places = copy_places(order, bytes, bytes, window);
      for (std::size_t run = 0; run < order.runs(); ++run) {
        EXPECT_GT(places[run].released_at, order.forward_index(run)) << run;
        EXPECT_LE(places[run].released_at, places[run].reload_at) << run;
        EXPECT_LE(places[run].reload_at, order.backward_index(run)) << run;
        EXPECT_TRUE(order.is_backward(places[run].reload_at) || places[run].reload_at + 2 >= order.backward_index(run))
            << run;
      }
      // What the lag holds and what is back, with the next run's in reserve.
      EXPECT_LE(most_on_device(order, bytes, places), 2 * window.lag + window.lookahead + 2 * 20);
    }
  }
}

TEST(FormerRunsTest, AreOverWhenTheyHaveReadTheirPlaces) {
  const SequenceOrder order = one_forward_one_backward(/*calls=*/1, /*warm_up=*/1, /*microbatches=*/4);
  const std::vector<bool> none(4);
  const std::vector<bool> first = {true, false, false, false};  // it is read again after its backward
  using Runs = std::vector<std::size_t>;
  EXPECT_EQ(former_runs(order, {0, 0, 0, 0}, none), (Runs{0, 1, 0, 1}));
  EXPECT_EQ(former_runs(order, {0, 1, 0, 0}, none), (Runs{0, 1, 0, 3}));
  EXPECT_EQ(former_runs(order, {0, 0, 0, 0}, first), (Runs{0, 1, 2, 1})) << "at the end of the order";
  std::vector<SequenceStep> steps = order.steps();
  steps.insert(steps.begin() + 5, {0, 0, Direction::weights});
  EXPECT_EQ(former_runs(SequenceOrder(steps), {0, 1, 0, 0}, first), (Runs{0, 1, 2, 0}));
}

}  // namespace
}  // namespace sidestream
