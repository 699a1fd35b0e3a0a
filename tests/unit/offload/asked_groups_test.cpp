// Groups whose program says when they are offloaded and reloaded.
#include <vector>

#include <gtest/gtest.h>

#include "unit/offload/groups_by_hand.h"

namespace sidestream {
namespace {

class AskedGroupsTest : public GroupsInAStep {
 protected:
  AskedGroupsTest() : GroupsInAStep(CopyLimits{}) {}

  std::shared_ptr<SavedStorage> end_later(Group& group, float value) {
    group.ended_later = true;
    return end_group(group, value);
  }
  [[nodiscard]] std::int64_t allocated() const { return runtime_->memory_stats().allocated; }
};

TEST_F(AskedGroupsTest, LeaveOneByOneWhenAsked) {
  Group groups[2];
  const auto first = end_later(groups[0], 1);
  const auto second = end_later(groups[1], 2);
  EXPECT_EQ(left(), 0U);
  offload_->start_offload(groups[1]);
  EXPECT_EQ(left(), kBytes);
  EXPECT_EQ(first->place, SavedStorage::Place::device);
  EXPECT_EQ(second->place, SavedStorage::Place::offloading);
  offload_->start_offload(groups[1]);
  EXPECT_EQ(left(), kBytes) << "once";
  offload_->send_delayed();
  EXPECT_EQ(left(), 2 * kBytes);
  EXPECT_EQ(first->place, SavedStorage::Place::offloading);
}

TEST_F(AskedGroupsTest, GiveTheirMemoryBackWhenAsked) {
  Group groups[2];
  const std::int64_t before = allocated();
  const auto late = end_later(groups[0], 1);
  const auto other = end_group(groups[1], 2);
  EXPECT_EQ(allocated() - before, static_cast<std::int64_t>(2 * kBytes)) << "the lag holds both";
  offload_->finish_offload(groups[1]);
  EXPECT_EQ(allocated() - before, static_cast<std::int64_t>(kBytes));
  offload_->finish_offload(groups[0]);
  EXPECT_EQ(allocated(), before);
  offload_->finish_offload(groups[0]);
  EXPECT_EQ(late->place, SavedStorage::Place::host);
  EXPECT_EQ(other->place, SavedStorage::Place::host);
  EXPECT_EQ(doubled(*late)[0].item<float>(), 2);
  EXPECT_EQ(doubled(*other)[0].item<float>(), 4);
}

TEST_F(AskedGroupsTest, AreOnTheirWayBackBeforeBackwardAsks) {
  Group group;
  const auto saved = end_group(group, 3);
  offload_->start_reload(group);
  EXPECT_EQ(mover_->counts().reloaded_bytes, 0U) << "it is still on the device";
  offload_->finish_offload(group);
  offload_->start_reload(group);
  EXPECT_EQ(mover_->counts().reloaded_bytes, kBytes);
  EXPECT_EQ(saved->place, SavedStorage::Place::reloading);
  offload_->start_reload(group);
  EXPECT_EQ(doubled(*saved)[0].item<float>(), 6);
  EXPECT_EQ(mover_->counts().reloaded_bytes, kBytes) << "once";
  EXPECT_EQ(mover_->counts().inline_reloads, 0U);
}

TEST_F(AskedGroupsTest, StayWhereTheReloadIsAskedForBeforeTheyLeft) {
  Group group;
  const auto saved = end_later(group, 3);
  offload_->start_reload(group);
  offload_->send_delayed();
  EXPECT_EQ(left(), 0U);
  EXPECT_EQ(saved->place, SavedStorage::Place::device);
  EXPECT_EQ(doubled(*saved)[0].item<float>(), 6);
}

TEST_F(AskedGroupsTest, DoNothingWhereNothingIsOffloaded) {
  Group group;
  group.scope = tree_.child(tree_.root(), "empty");
  offload_->group_ended(group);
  for (const auto act : {&EagerOffload::start_offload, &EagerOffload::finish_offload, &EagerOffload::start_reload}) {
    (*offload_.*act)(group);
  }
  EXPECT_EQ(left(), 0U);
}

TEST_F(AskedGroupsTest, AReleasedStorageBelongsToItsGroupAlone) {
  Group groups[2];
  const auto first = end_later(groups[0], 3);
  const auto second = end_group(groups[1], 5);
  offload_->finish_offload(groups[1]);
  const c10::Storage held = first->device;
  const at::Tensor view = view_.restore(held);
  const std::int64_t before = allocated();
  const c10::Storage memory = offload_->release(held, {first}, "released by hand");
  EXPECT_EQ(first->device.unsafeGetStorageImpl(), memory.unsafeGetStorageImpl());
  EXPECT_EQ(allocated(), before) << "until it is copied";
  EXPECT_THROW((void)view.const_data_ptr(), c10::Error);
  EXPECT_EQ(doubled(*first)[0].item<float>(), 6) << "from where it was";
}

TEST_F(AskedGroupsTest, MemoryThatIsReleasedBehindTheCopyIsFreeAtOnce) {
  Group group;
  const at::Tensor tensor = filled(3);
  const auto saved = std::make_shared<SavedStorage>(offload_, &group, tensor.storage());
  group.scope = tree_.child(tree_.root(), "group");
  saved->to_offload = true;
  group.storages.push_back(saved);
  offload_->group_ended(group);
  const std::int64_t before = allocated();
  offload_->finish_offload(group);
  EXPECT_EQ(allocated(), before) << "the program holds it";
  view_ = StorageView::capture(tensor);
  (void)offload_->release(tensor.storage(), {saved}, "released by hand");
  EXPECT_EQ(before - allocated(), static_cast<std::int64_t>(kBytes));
  EXPECT_EQ(doubled(*saved)[0].item<float>(), 6);
}

/// How many pieces of work that are not copies the first copy to the host is ordered behind.
std::size_t work_before_the_copy(const sim::Recording& recording) {
  const auto& works = recording.works();
  const auto copies = [&](std::size_t i) { return works[i].work->kind == sim::Work::Kind::copy_to_host; };
  std::vector<bool> before(works.size(), false);
  std::size_t copy = 0;
  while (copy < works.size() && !copies(copy)) {
    ++copy;
  }
  std::size_t count = 0;
  for (std::size_t i = copy + 1; i-- > 0;) {
    if (i == copy || before[i]) {
      count += works[i].work->kind == sim::Work::Kind::compute ? 1 : 0;
      for (const std::uint32_t earlier : works[i].after) {
        before[earlier] = true;
      }
    }
  }
  return count;
}

TEST_F(AskedGroupsTest, AMarkedTensorsCopyWaitsForTheWorkBeforeTheMark) {
  std::size_t counts[2];
  for (const bool marked : {false, true}) {
    Group group;
    group.scope = tree_.child(tree_.root(), "group");
    sim::Recording recording;
    const at::Tensor tensor = filled(3);
    const auto saved = std::make_shared<SavedStorage>(offload_, &group, tensor.storage());
    saved->to_offload = true;
    saved->ready = marked ? offload_->mark_ready(tensor.storage()) : ReadyMark();
    group.storages.push_back(saved);
    const at::Tensor after = at::mul(filled(1), 4);
    offload_->group_ended(group);
    recording.stop();
    counts[marked ? 1 : 0] = work_before_the_copy(recording);
    view_ = StorageView::capture(tensor);
    EXPECT_EQ(doubled(*saved)[0].item<float>(), 6);
  }
  EXPECT_GT(counts[1], 0U) << "what makes it";
  EXPECT_GT(counts[0], counts[1]) << "unmarked: what came later, too";
}

TEST_F(AskedGroupsTest, GiveTheSameBytesInEveryOrder) {
  Group groups[4];
  at::Tensor results[4];
  sim::Recording recording;
  for (const int i : {0, 1, 2, 3}) {
    auto saved = i % 2 == 0 ? end_later(groups[i], 3) : end_group(groups[i], 5);
    const at::Tensor beside = at::mul(filled(1), 4);
    offload_->start_offload(groups[i]);
    if (i > 1) {
      (void)offload_->release(c10::Storage(saved->device), {saved}, "released by hand");
    }
    offload_->finish_offload(groups[i]);
    const at::Tensor reused = filled(9);
    offload_->start_reload(groups[i]);
    const at::Tensor again = filled(8);
    results[i] = doubled(*saved);
  }
  recording.stop();
  EXPECT_EQ(mover_->counts().reloaded_bytes, 4 * kBytes);
  EXPECT_EQ(mover_->counts().inline_reloads, 0U);
  expect_in_every_order(recording, {results[0], results[1], results[2], results[3]},
                        {filled(6), filled(10), filled(6), filled(10)});
}

}  // namespace
}  // namespace sidestream
