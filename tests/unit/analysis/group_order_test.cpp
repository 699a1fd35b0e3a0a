#include "analysis/group_order.h"

#include <cstdint>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace sidestream {
namespace {

GroupEvent end_of(std::uint32_t group) { return {group, GroupEvent::Kind::ended}; }
GroupEvent use_of(std::uint32_t group) { return {group, GroupEvent::Kind::used}; }

CopyWindow window(std::uint64_t lag, std::uint64_t lookahead = 0) { return {lag, lookahead}; }

using Pairs = std::vector<std::pair<std::size_t, std::uint32_t>>;

Pairs pairs(const std::vector<GroupReload>& reloads) {
  Pairs result;
  for (const GroupReload& each : reloads) {
    result.emplace_back(each.event, each.group);
  }
  return result;
}

/// A forward of five groups and its backward.
const std::vector<GroupEvent> kPlain = {end_of(0), end_of(1), end_of(2), end_of(3), end_of(4),
                                        use_of(4), use_of(3), use_of(2), use_of(1), use_of(0)};
/// One forward and one backward in turn after two forwards of two groups: 0 1, 2 3, 4 5.
const std::vector<GroupEvent> kInTurn = {end_of(0), end_of(1), end_of(2), end_of(3), use_of(1), use_of(0),
                                         end_of(4), end_of(5), use_of(3), use_of(2), use_of(5), use_of(4)};

TEST(NeededImmediatelyWithinTest, TheLastGroupsThatFitIntoTheLagDo) {
  using Flags = std::vector<bool>;
  EXPECT_EQ(needed_immediately_within(kPlain, {1, 1, 1, 1, 1}, window(2)), (Flags{false, false, false, true, true}));
  EXPECT_EQ(needed_immediately_within(kPlain, {1, 1, 1, 1, 2}, window(2)), (Flags{false, false, false, false, true}));
  EXPECT_EQ(needed_immediately_within(kPlain, {1, 1, 1, 1, 1}, window(9)), (Flags{true, true, true, true, true}));
}

TEST(NeededImmediatelyWithinTest, FewGroupsInFlightKeepTheLastAlone) {
  const std::vector<bool> last = {false, false, false, false, true};
  for (const std::size_t groups : {0, 1}) {
    EXPECT_EQ(needed_immediately_within(kPlain, {1, 1, 1, 1, 1}, {9, 0, groups}), last);
  }
}

TEST(NeededImmediatelyWithinTest, OnlyTheLastMicrobatchDoesWhereForwardsRunAhead) {
  EXPECT_EQ(needed_immediately_within(kInTurn, {1, 1, 1, 1, 1, 1}, window(2)),
            (std::vector<bool>{false, false, false, false, true, true}));
}

TEST(GroupReloadsTest, OneAheadWithTheMemoryThatBackwardFrees) {
  const std::vector<GroupBytes> groups = {{1, 1}, {1, 1}, {1, 1}, {1, 0}, {1, 0}};
  EXPECT_EQ(pairs(group_reloads(kPlain, groups, window(2))), (Pairs{{6, 2}, {7, 1}, {8, 0}}));
}

TEST(GroupReloadsTest, EarlierWithLookahead) {
  const std::vector<GroupBytes> groups = {{1, 1}, {1, 1}, {1, 1}, {1, 0}, {1, 0}};
  EXPECT_EQ(pairs(group_reloads(kPlain, groups, window(2, 1))), (Pairs{{5, 2}, {6, 1}, {7, 0}}));
}

TEST(GroupReloadsTest, AsEarlyAsThereIsRoomButAfterItWasFreed) {
  const std::vector<GroupBytes> groups = {{1, 1}, {1, 1}, {1, 1}, {1, 0}, {1, 0}};
  EXPECT_EQ(pairs(group_reloads(kPlain, groups, window(2, 9))), (Pairs{{5, 2}, {5, 1}, {5, 0}}))
      << "in the order of their use";
}

TEST(GroupReloadsTest, AForwardsLastGroupComesBetweenAReloadAndTheBackwardAfterThatForward) {
  const std::vector<GroupBytes> groups = {{1, 1}, {1, 1}, {1, 1}, {1, 1}, {1, 1}, {1, 0}};
  EXPECT_EQ(pairs(group_reloads(kInTurn, groups, window(1))), (Pairs{{2, 1}, {4, 0}, {6, 3}, {8, 2}, {10, 4}}));
}

TEST(GroupReloadsTest, NothingIsReloadedBeforeItIsFreed) {
  const std::vector<GroupBytes> groups = {{1, 1}, {1, 1}, {1, 1}, {1, 1}, {1, 0}, {1, 0}};
  EXPECT_EQ(pairs(group_reloads(kInTurn, groups, window(2))), (Pairs{{3, 1}, {4, 0}, {7, 3}, {8, 2}}))
      << "groups 1 and 3 are let go of with the last group before their use";
}

TEST(GroupReloadsTest, AGroupThatIsNeverUsedOrNeverFreedIsNotReloaded) {
  const std::vector<GroupEvent> order = {end_of(0), end_of(1), end_of(2), use_of(2), use_of(1)};
  EXPECT_EQ(pairs(group_reloads(order, {{1, 1}, {1, 1}, {1, 1}}, window(2))), Pairs{});
}

TEST(GroupReloadsTest, AGroupThatDoesNotFitIsReloadedOneAhead) {
  const std::vector<GroupBytes> groups = {{5, 5}, {1, 1}, {1, 1}, {1, 0}, {1, 0}};
  EXPECT_EQ(pairs(group_reloads(kPlain, groups, window(2))), (Pairs{{6, 2}, {7, 1}, {8, 0}}));
}

}  // namespace
}  // namespace sidestream
