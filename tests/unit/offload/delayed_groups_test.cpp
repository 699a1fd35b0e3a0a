// Groups whose copies to the host wait for the next graph: when they leave, and when they need not.
#include <gtest/gtest.h>

#include "unit/offload/groups_by_hand.h"

namespace sidestream {
namespace {

/// Groups named "late" are delayed, others are not.
class DelayedGroupsTest : public GroupsInAStep {
 protected:
  DelayedGroupsTest() : GroupsInAStep(CopyLimits{}, NamePatterns::parse("late")) {}

  std::shared_ptr<SavedStorage> end_late(Group& group, float value) { return end_group(group, value, "late"); }
  /// No slot on the host is in use.
  void expect_all_room() {
    HostArena::Lease leases[3];
    for (HostArena::Lease& lease : leases) {
      lease = arena_->lease(kBytes);
      EXPECT_TRUE(lease);
    }
  }
};

TEST_F(DelayedGroupsTest, LeaveWhenAGraphIsLaunchedInTheOrderInWhichTheyEnded) {
  Group groups[2];
  const auto first = end_late(groups[0], 1);
  const auto second = end_late(groups[1], 2);
  EXPECT_EQ(left(), 0U);
  offload_->graph_launched();
  EXPECT_EQ(left(), 2 * kBytes);
  EXPECT_EQ(first->place, SavedStorage::Place::offloading);
  EXPECT_EQ(second->place, SavedStorage::Place::offloading);
  offload_->graph_launched();
  EXPECT_EQ(left(), 2 * kBytes) << "once";
}

TEST_F(DelayedGroupsTest, OthersLeaveAtTheirScopesEnd) {
  Group groups[2];
  const auto late = end_late(groups[0], 1);
  const auto other = end_group(groups[1], 2, "other");
  EXPECT_EQ(left(), kBytes);
  EXPECT_EQ(late->place, SavedStorage::Place::device);
  EXPECT_EQ(other->place, SavedStorage::Place::offloading);
}

TEST_F(DelayedGroupsTest, LeaveAtOnceInASizingStep) {
  offload_->end_step();
  offload_->begin_sizing_step([](std::int64_t) {});
  Group group;
  const auto saved = end_late(group, 1);
  EXPECT_EQ(left(), kBytes);
  (void)offload_->end_sizing_step();
}

TEST_F(DelayedGroupsTest, LeaveAtTheStepsEndWhereNoGraphCame) {
  Group group;
  const auto saved = end_late(group, 7);
  offload_->end_step();
  EXPECT_EQ(left(), kBytes);
  EXPECT_EQ(saved->place, SavedStorage::Place::host);
  EXPECT_EQ(doubled(*saved)[0].item<float>(), 14);
}

TEST_F(DelayedGroupsTest, StayWhereTheirBackwardComesFirst) {
  Group group;
  const auto saved = end_late(group, 3);
  EXPECT_EQ(doubled(*saved)[0].item<float>(), 6);
  offload_->graph_launched();
  EXPECT_EQ(left(), 0U);
  EXPECT_EQ(saved->place, SavedStorage::Place::device);
  EXPECT_EQ(doubled(*saved)[0].item<float>(), 6) << "a graph that is kept";
  expect_all_room();
}

TEST_F(DelayedGroupsTest, LeaveWhenTheLagIsExceeded) {
  Group groups[3];
  const auto first = end_late(groups[0], 1);
  const auto second = end_late(groups[1], 2);
  EXPECT_EQ(left(), 0U);
  const auto third = end_late(groups[2], 3);
  EXPECT_EQ(left(), kBytes);
  EXPECT_EQ(first->place, SavedStorage::Place::host);
  EXPECT_EQ(second->place, SavedStorage::Place::device);
  EXPECT_EQ(third->place, SavedStorage::Place::device);
}

TEST_F(DelayedGroupsTest, CopyNothingThatNobodyNeedsAnyMore) {
  Group group;
  end_late(group, 1).reset();
  offload_->graph_launched();
  EXPECT_EQ(left(), 0U);
  expect_all_room();
}

TEST_F(DelayedGroupsTest, GiveTheSameBytesInEveryOrder) {
  Group groups[2];
  at::Tensor results[2];
  sim::Recording recording;
  for (const int i : {0, 1}) {
    auto saved = end_late(groups[i], i == 0 ? 3.0F : 5.0F);
    const at::Tensor beside = at::mul(filled(1), 4);  // what the graph would do
    offload_->graph_launched();
    offload_->end_step();  // let go of: the next group's memory
    offload_->begin_step();
    const at::Tensor reused = filled(9);
    results[i] = doubled(*saved);
  }
  recording.stop();
  EXPECT_EQ(mover_->counts().reloaded_bytes, 2 * kBytes);
  expect_in_every_order(recording, {results[0], results[1]}, {filled(6), filled(10)});
}

}  // namespace
}  // namespace sidestream
