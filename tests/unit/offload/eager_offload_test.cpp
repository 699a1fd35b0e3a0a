#include "offload/eager_offload.h"

#include <memory>
#include <optional>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <gtest/gtest.h>

#include "memory/storage_view.h"
#include "offload/scope_tree.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream {
namespace {

constexpr std::int64_t kNumel = 1024;
constexpr std::size_t kBytes = kNumel * sizeof(float);

/// Groups made by hand, and room on the host for one storage.
class EagerOffloadTest : public testing::Test {
 protected:
  void SetUp() override {
    const std::size_t sizes[] = {kBytes};
    ASSERT_EQ(arena_->plan(sizes), std::vector<bool>{true});
    arena_->seal();
  }
  void TearDown() override { runtime_->synchronize_device(); }

  [[nodiscard]] at::Tensor filled(float value) const {
    return at::full({kNumel}, value, c10::TensorOptions().dtype(at::kFloat).device(runtime_->device()));
  }
  /// A group of one storage, `value` everywhere, that its scope's end sends away.
  std::shared_ptr<SavedStorage> leave(Group& group, float value) {
    group.scope = tree_.child(tree_.root(), "group");
    const at::Tensor tensor = filled(value);
    view_ = StorageView::capture(tensor);
    auto saved = std::make_shared<SavedStorage>(offload_, &group, tensor.storage());
    saved->to_offload = true;
    group.storages.push_back(saved);
    offload_->group_ended(group);
    return saved;
  }
  /// What backward computes from it.
  at::Tensor doubled(SavedStorage& saved) { return at::mul(view_.restore(offload_->fetch(saved)), 2); }

  std::shared_ptr<Runtime> runtime_ = make_runtime(c10::Device(c10::DeviceType::PrivateUse1, 0));
  std::shared_ptr<HostArena> arena_ = std::make_shared<HostArena>(*runtime_, std::size_t{1} << 20);
  std::shared_ptr<GroupMover> mover_ = std::make_shared<GroupMover>(runtime_, arena_);
  std::shared_ptr<EagerOffload> offload_ =
      std::make_shared<EagerOffload>(runtime_, mover_, CopyLimits{std::nullopt, 0, 0});
  ScopeTree tree_{NamePatterns::parse("**")};
  StorageView view_;
};

TEST_F(EagerOffloadTest, AHostSlotIsWrittenAfterTheCopyThatLastReadIt) {
  const OwnedStream a = runtime_->create_stream();
  const OwnedStream b = runtime_->create_stream();
  Group groups[2];
  at::Tensor results[2];
  sim::Recording recording;
  for (const int i : {0, 1}) {
    const StreamGuard on_stream(*runtime_, i == 0 ? a : b);
    auto saved = leave(groups[i], i == 0 ? 3.0F : 5.0F);
    ASSERT_EQ(saved->place, SavedStorage::Place::host);
    results[i] = doubled(*saved);
  }
  recording.stop();
  EXPECT_EQ(arena_->stats().refusals, 0U) << "both used the one slot";
  EXPECT_EQ(mover_->counts().reloaded_bytes, 2 * kBytes);
  const auto expected = sim::raw_bytes({filled(6), filled(10)});
  ASSERT_EQ(sim::raw_bytes({results[0], results[1]}), expected);
  sim::expect_same_in_every_order(recording, {results[0], results[1]}, expected, 100);
  runtime_->synchronize_device();
}

TEST_F(EagerOffloadTest, ASlotThatWasNeverReadGoesBackWithTheCopyThatWroteIt) {
  const OwnedStream next = runtime_->create_stream();
  const PinnedMemory source = runtime_->allocate_pinned(kBytes);
  const at::Tensor other = filled(8);
  at::Tensor result;
  Group group;
  runtime_->synchronize_device();
  sim::Recording recording;
  leave(group, 3).reset();
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
  const auto expected = sim::raw_bytes({filled(8)});
  ASSERT_EQ(sim::raw_bytes({result}), expected);
  sim::expect_same_in_every_order(recording, {result}, expected, 100);
  runtime_->synchronize_device();
}

TEST_F(EagerOffloadTest, AGroupWithoutRoomStaysAndIsCounted) {
  Group groups[2];
  const auto first = leave(groups[0], 1);
  const auto second = leave(groups[1], 2);
  EXPECT_EQ(first->place, SavedStorage::Place::host);
  EXPECT_EQ(second->place, SavedStorage::Place::device);
  EXPECT_EQ(mover_->counts().refused_leases, 1U);
  EXPECT_EQ(doubled(*second)[0].item<float>(), 4);
}

TEST_F(EagerOffloadTest, ARetainedStorageComesBackOnce) {
  Group group;
  const auto saved = leave(group, 7);
  EXPECT_EQ(doubled(*saved)[0].item<float>(), 14);
  EXPECT_EQ(doubled(*saved)[0].item<float>(), 14);
  EXPECT_EQ(mover_->counts().offloaded_bytes, kBytes);
  EXPECT_EQ(mover_->counts().reloaded_bytes, kBytes);
}

}  // namespace
}  // namespace sidestream
