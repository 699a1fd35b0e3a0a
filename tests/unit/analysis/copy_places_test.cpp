#include "analysis/copy_places.h"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

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
    at.push_back(layer.returns_at);
  }
  return at;
}

TEST(CopyWindowTest, IsAsDeepAsTheLargestLayersWhereNoneIsGiven) {
  EXPECT_EQ(copy_window({10, 30, 20}, std::nullopt, 0, 2).lag, 50);
  EXPECT_EQ(copy_window({10, 30, 20}, std::nullopt, 0, 1).lag, 30);
  EXPECT_EQ(copy_window({10}, std::nullopt, 0, 2).lag, 10);
  EXPECT_EQ(copy_window({}, std::nullopt, 7, 2).lag, 0);
}

TEST(CopyWindowTest, IsAsGivenButHoldsTheLargestLayer) {
  EXPECT_EQ(copy_window({10, 30, 20}, 45, 7, 2).lag, 45);
  EXPECT_EQ(copy_window({10, 30, 20}, 45, 7, 2).lookahead, 7);
  EXPECT_EQ(copy_window({10, 30, 20}, 5, 0, 2).lag, 30);
}

TEST(FirstToStayTest, IsTheFirstOfThoseThatTurnRoundWithinTheLag) {
  EXPECT_EQ(first_to_stay({10, 10, 10, 10}, {20, 0}), 2);
  EXPECT_EQ(first_to_stay({10, 10, 10, 10}, {29, 0}), 2);
  EXPECT_EQ(first_to_stay({10, 10, 10, 1}, {20, 0}), 2) << "11 bytes do, 21 would not";
  EXPECT_EQ(first_to_stay({10, 10}, {20, 0}), 0);
  EXPECT_EQ(first_to_stay({10, 0, 0}, {10, 0}), 0);
}

TEST(CopyPlacesTest, SourcesAreReleasedAsLateAsTheLagAllows) {
  EXPECT_EQ(released(copy_places({10, 10, 10, 10}, {10, 10, 10, 0}, {10, 0})), (std::vector<std::size_t>{1, 2, 3, 4}));
  EXPECT_EQ(released(copy_places({10, 10, 10, 10}, {10, 10, 0, 0}, {20, 0})), (std::vector<std::size_t>{2, 3, 4, 4}));
  EXPECT_EQ(released(copy_places({10, 30, 10, 10}, {10, 30, 0, 0}, {40, 0})), (std::vector<std::size_t>{2, 3, 4, 4}));
}

TEST(CopyPlacesTest, SourcesAreReleasedBeforeTheFirstBackward) {
  EXPECT_EQ(released(copy_places({10, 10}, {10, 10}, {100, 0})), (std::vector<std::size_t>{2, 2}));
}

TEST(CopyPlacesTest, TargetsAreAllocatedWithTheBackwardAboveAtTheLatest) {
  // Places of backwards: layer 3 at 4, 2 at 5, 1 at 6, 0 at 7.
  EXPECT_EQ(returns(copy_places({10, 10, 10, 10}, {10, 10, 10, 0}, {10, 0})), (std::vector<std::size_t>{6, 5, 4, 4}));
  EXPECT_EQ(returns(copy_places({10, 10}, {10, 10}, {10, 0})), (std::vector<std::size_t>{2, 2}))
      << "the last layer's with its own";
}

TEST(CopyPlacesTest, TargetsAreAllocatedAsEarlyAsTheMemoryOfTheLagAllows) {
  // Layers 2 and 3 stay: the backward of 3 must be over before there is room for layer 1.
  EXPECT_EQ(returns(copy_places({10, 10, 10, 10}, {10, 10, 0, 0}, {20, 0})), (std::vector<std::size_t>{6, 5, 4, 4}));
  EXPECT_EQ(returns(copy_places({10, 10, 10, 10}, {10, 10, 0, 0}, {20, 10})), (std::vector<std::size_t>{5, 4, 4, 4}));
  EXPECT_EQ(returns(copy_places({10, 10, 10, 10}, {10, 10, 0, 0}, {20, 20})), (std::vector<std::size_t>{4, 4, 4, 4}));
}

TEST(CopyPlacesTest, WhatLeavesInPartNeedsRoomForThatPartOnly) {
  EXPECT_EQ(released(copy_places({5, 5, 10}, {5, 5, 0}, {15, 0})), (std::vector<std::size_t>{2, 3, 3}));
}

}  // namespace
}  // namespace sidestream
