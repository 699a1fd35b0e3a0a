// Groups whose copies to the host wait for the next graph: when they leave, and when they need not.
#include <memory>

#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <gtest/gtest.h>

#include "memory/storage_view.h"
#include "offload/eager_offload.h"
#include "offload/scope_tree.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream {
namespace {

constexpr std::int64_t kDelayedNumel = 2048;
constexpr std::size_t kDelayedBytes = kDelayedNumel * sizeof(float);

/// Groups made by hand: those named "late" are delayed, others are not. Room on the host for three storages, a lag of two.
class DelayedGroupsTest : public testing::Test {
 protected:
  void SetUp() override {
    const std::size_t sizes[] = {kDelayedBytes, kDelayedBytes, kDelayedBytes};
    (void)arena_->plan(sizes);
    arena_->seal();
    offload_->set_window({{2 * kDelayedBytes, 0}, 8});
    offload_->begin_step();
  }
  void TearDown() override {
    offload_->end_step();  // what is still on its way holds its storages, and they hold the mover
    runtime_->synchronize_device();
  }

  [[nodiscard]] at::Tensor filled_late(float value) const {
    return at::full({kDelayedNumel}, value, c10::TensorOptions().dtype(at::kFloat).device(runtime_->device()));
  }
  /// A group of one storage, `value` everywhere, whose scope has ended.
  std::shared_ptr<SavedStorage> end_group(Group& group, float value, const char* name = "late") {
    group.scope = tree_.child(tree_.root(), name);
    const at::Tensor tensor = filled_late(value);
    view_ = StorageView::capture(tensor);
    auto saved = std::make_shared<SavedStorage>(offload_, &group, tensor.storage());
    saved->to_offload = true;
    group.storages.push_back(saved);
    offload_->group_ended(group);
    return saved;
  }
  at::Tensor backward_of(SavedStorage& saved) { return at::mul(view_.restore(offload_->fetch(saved)), 2); }
  /// No slot on the host is in use.
  void expect_all_room() {
    HostArena::Lease leases[3];
    for (HostArena::Lease& lease : leases) {
      lease = arena_->lease(kDelayedBytes);
      EXPECT_TRUE(lease);
    }
  }
  [[nodiscard]] std::uint64_t left() const { return mover_->counts().offloaded_bytes; }

  std::shared_ptr<Runtime> runtime_ = make_runtime(c10::Device(c10::DeviceType::PrivateUse1, 0));
  std::shared_ptr<HostArena> arena_ = std::make_shared<HostArena>(*runtime_, std::size_t{1} << 20);
  std::shared_ptr<GroupMover> mover_ = std::make_shared<GroupMover>(runtime_, arena_);
  std::shared_ptr<EagerOffload> offload_ = std::make_shared<EagerOffload>(runtime_, mover_, CopyLimits{});
  ScopeTree tree_{NamePatterns::parse("**"), NamePatterns::parse("late")};
  StorageView view_;
};

TEST_F(DelayedGroupsTest, LeaveWhenAGraphIsLaunchedInTheOrderInWhichTheyEnded) {
  Group groups[2];
  const auto first = end_group(groups[0], 1);
  const auto second = end_group(groups[1], 2);
  EXPECT_EQ(left(), 0U);
  offload_->graph_launched();
  EXPECT_EQ(left(), 2 * kDelayedBytes);
  EXPECT_EQ(first->place, SavedStorage::Place::offloading);
  EXPECT_EQ(second->place, SavedStorage::Place::offloading);
  offload_->graph_launched();
  EXPECT_EQ(left(), 2 * kDelayedBytes) << "once";
}

TEST_F(DelayedGroupsTest, OthersLeaveAtTheirScopesEnd) {
  Group groups[2];
  const auto late = end_group(groups[0], 1);
  const auto other = end_group(groups[1], 2, "other");
  EXPECT_EQ(left(), kDelayedBytes);
  EXPECT_EQ(late->place, SavedStorage::Place::device);
  EXPECT_EQ(other->place, SavedStorage::Place::offloading);
}

TEST_F(DelayedGroupsTest, LeaveAtOnceInASizingStep) {
  offload_->end_step();
  offload_->begin_sizing_step([](std::int64_t) {});
  Group group;
  const auto saved = end_group(group, 1);
  EXPECT_EQ(left(), kDelayedBytes);
  (void)offload_->end_sizing_step();
}

TEST_F(DelayedGroupsTest, LeaveAtTheStepsEndWhereNoGraphCame) {
  Group group;
  const auto saved = end_group(group, 7);
  offload_->end_step();
  EXPECT_EQ(left(), kDelayedBytes);
  EXPECT_EQ(saved->place, SavedStorage::Place::host);
  EXPECT_EQ(backward_of(*saved)[0].item<float>(), 14);
}

TEST_F(DelayedGroupsTest, StayWhereTheirBackwardComesFirst) {
  Group group;
  const auto saved = end_group(group, 3);
  EXPECT_EQ(backward_of(*saved)[0].item<float>(), 6);
  offload_->graph_launched();
  EXPECT_EQ(left(), 0U);
  EXPECT_EQ(saved->place, SavedStorage::Place::device);
  EXPECT_EQ(backward_of(*saved)[0].item<float>(), 6) << "a graph that is kept";
  expect_all_room();
}

TEST_F(DelayedGroupsTest, LeaveWhenTheLagIsExceeded) {
  Group groups[3];
  const auto first = end_group(groups[0], 1);
  const auto second = end_group(groups[1], 2);
  EXPECT_EQ(left(), 0U);
  const auto third = end_group(groups[2], 3);
  EXPECT_EQ(left(), kDelayedBytes);
  EXPECT_EQ(first->place, SavedStorage::Place::host);
  EXPECT_EQ(second->place, SavedStorage::Place::device);
  EXPECT_EQ(third->place, SavedStorage::Place::device);
}

TEST_F(DelayedGroupsTest, CopyNothingThatNobodyNeedsAnyMore) {
  Group group;
  end_group(group, 1).reset();
  offload_->graph_launched();
  EXPECT_EQ(left(), 0U);
  expect_all_room();
}

TEST_F(DelayedGroupsTest, GiveTheSameBytesInEveryOrder) {
  Group groups[2];
  at::Tensor results[2];
  sim::Recording recording;
  for (const int i : {0, 1}) {
    auto saved = end_group(groups[i], i == 0 ? 3.0F : 5.0F);
    const at::Tensor beside = at::mul(filled_late(1), 4);  // what the graph would do
    offload_->graph_launched();
    offload_->end_step();  // let go of: the next group's memory
    offload_->begin_step();
    const at::Tensor reused = filled_late(9);
    results[i] = backward_of(*saved);
  }
  recording.stop();
  EXPECT_EQ(mover_->counts().reloaded_bytes, 2 * kDelayedBytes);
  const auto expected = sim::raw_bytes({filled_late(6), filled_late(10)});
  ASSERT_EQ(sim::raw_bytes({results[0], results[1]}), expected);
  sim::expect_same_in_every_order(recording, {results[0], results[1]}, expected, 100);
  runtime_->synchronize_device();
}

}  // namespace
}  // namespace sidestream
