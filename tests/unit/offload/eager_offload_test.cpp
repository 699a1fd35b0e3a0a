#include "offload/eager_offload.h"

#include <memory>
#include <optional>

#include <ATen/ops/empty_like.h>
#include <gtest/gtest.h>

#include "unit/offload/groups_by_hand.h"

namespace sidestream {
namespace {

/// Room on the host for one storage.
class EagerOffloadTest : public GroupsByHand {
 protected:
  EagerOffloadTest() : GroupsByHand({std::nullopt, 0, 0}) {}
  void SetUp() override { pin({kBytes}); }
};

TEST_F(EagerOffloadTest, AHostSlotIsWrittenAfterTheCopyThatLastReadIt) {
  const OwnedStream a = runtime_->create_stream();
  const OwnedStream b = runtime_->create_stream();
  Group groups[2];
  at::Tensor results[2];
  sim::Recording recording;
  for (const int i : {0, 1}) {
    const StreamGuard on_stream(*runtime_, i == 0 ? a : b);
    auto saved = end_group(groups[i], i == 0 ? 3.0F : 5.0F);
    ASSERT_EQ(saved->place, SavedStorage::Place::host);
    results[i] = doubled(*saved);
  }
  recording.stop();
  EXPECT_EQ(arena_->stats().refusals, 0U) << "both used the one slot";
  EXPECT_EQ(mover_->counts().reloaded_bytes, 2 * kBytes);
  expect_in_every_order(recording, {results[0], results[1]}, {filled(6), filled(10)});
}

TEST_F(EagerOffloadTest, ASlotThatWasNeverReadGoesBackWithTheCopyThatWroteIt) {
  const OwnedStream next = runtime_->create_stream();
  const PinnedMemory source = runtime_->allocate_pinned(kBytes);
  const at::Tensor other = filled(8);
  at::Tensor result;
  Group group;
  runtime_->synchronize_device();
  sim::Recording recording;
  end_group(group, 3).reset();
  const HostArena::Lease lease = arena_->lease(kBytes);
  ASSERT_TRUE(lease);
  {
    const StreamGuard on_next(*runtime_, next);
    lease.wait_before_use(next);
    runtime_->copy_to_host(lease.data(), other.const_data_ptr(), kBytes, next);
    result = at::empty_like(other);
    runtime_->copy_to_device(result.mutable_data_ptr(), lease.data(), kBytes, next);
  }
  recording.stop();
  expect_in_every_order(recording, {result}, {filled(8)});
}

TEST_F(EagerOffloadTest, AGroupWithoutRoomStaysAndIsCounted) {
  Group groups[2];
  const auto first = end_group(groups[0], 1);
  const auto second = end_group(groups[1], 2);
  EXPECT_EQ(first->place, SavedStorage::Place::host);
  EXPECT_EQ(second->place, SavedStorage::Place::device);
  EXPECT_EQ(groups[0].refused_bytes, 0U);
  EXPECT_EQ(groups[1].refused_bytes, kBytes);
  EXPECT_EQ(doubled(*second)[0].item<float>(), 4);
}

TEST_F(EagerOffloadTest, ARetainedStorageComesBackOnce) {
  Group group;
  const auto saved = end_group(group, 7);
  EXPECT_EQ(doubled(*saved)[0].item<float>(), 14);
  EXPECT_EQ(doubled(*saved)[0].item<float>(), 14);
  EXPECT_EQ(mover_->counts().offloaded_bytes, kBytes);
  EXPECT_EQ(mover_->counts().reloaded_bytes, kBytes);
}

}  // namespace
}  // namespace sidestream
