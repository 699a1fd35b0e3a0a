#include "analysis/copy_pace.h"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

namespace sidestream {
namespace {

using Bytes = std::vector<std::uint64_t>;

std::vector<LayerPace> layers(std::size_t count, double forward, double backward) {
  return std::vector<LayerPace>(count, LayerPace{forward, backward});
}

TEST(PassSecondsTest, CopiesThatKeepPaceCostNothing) {
  EXPECT_DOUBLE_EQ(pass_seconds(nested_order(4), {10, 10, 10, 10}, {10, 10, 0, 0}, {20, 0}, layers(4, 1, 2), {20, 20}),
                   12);
}

TEST(PassSecondsTest, AForwardWaitsForTheCopyWhoseMemoryItTakes) {
  // Two seconds a copy, begun with its forward: the second forward begins at 2, where the first copy ends, and the third at 4.
  EXPECT_DOUBLE_EQ(pass_seconds(nested_order(3), {10, 10, 10}, {10, 10, 0}, {10, 0}, layers(3, 1, 4), {5, 100}),
                   5 + 12);
}

TEST(PassSecondsTest, ABackwardWaitsForWhatComesBack) {
  // The copy of the first layer has left with its forward, comes back with the backward of the second, at 2, and takes 10.
  EXPECT_DOUBLE_EQ(pass_seconds(nested_order(2), {10, 10}, {10, 0}, {10, 0}, layers(2, 1, 2), {100, 1}), 2 + 10 + 2);
}

TEST(PacedWindowTest, IsTheLeastWhereCopiesKeepPace) {
  const CopyWindow window = paced_window(nested_order(12), Bytes(12, 10), {20, 0}, layers(12, 1, 2), {20, 20});
  EXPECT_EQ(window.lag, 20);
  EXPECT_EQ(window.lookahead, 0);
}

TEST(PacedWindowTest, HoldsSoMuchThatForwardsDoNotWaitForALinkThatFallsABitBehind) {
  // 0.95 of what is needed: after 40 layers two are behind.
  const CopyWindow window = paced_window(nested_order(40), Bytes(40, 10), {20, 0}, layers(40, 1, 2), {9.5, 9.5});
  EXPECT_GT(window.lag, 20);
  EXPECT_LE(window.lag, 100);
}

TEST(PacedWindowTest, HoldsHalfWhereThatIsNearlyEnough) {
  // A copy takes twice as long as a forward.
  EXPECT_EQ(paced_window(nested_order(8), Bytes(8, 10), {20, 0}, layers(8, 1, 2), {5, 5}).lag, 40);
}

TEST(PacedWindowTest, OffloadsNoLessWhereTheLinkCannotCarryItAnyway) {
  EXPECT_EQ(paced_window(nested_order(40), Bytes(40, 10), {20, 0}, layers(40, 1, 2), {2, 2}).lag, 20);
}

TEST(PacedWindowTest, LooksAheadWhereThatFillsTheLink) {
  const CopyWindow window = paced_window(nested_order(40), Bytes(40, 10), {20, 0}, layers(40, 1, 1), {100, 9});
  EXPECT_GT(window.lookahead, 0);
  EXPECT_LE(window.lookahead, 50);
}

TEST(PacedWindowTest, NothingToOffloadNeedsNoWindow) {
  EXPECT_EQ(paced_window(nested_order(0), {}, {0, 0}, {}, {1, 1}).lag, 0);
  EXPECT_EQ(paced_window(nested_order(2), {0, 0}, {0, 0}, layers(2, 1, 1), {1, 1}).lag, 0);
}

}  // namespace
}  // namespace sidestream
