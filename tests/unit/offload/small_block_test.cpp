// Small storages of groups that are made by hand.
#include "offload/small_block.h"

#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <gtest/gtest.h>

#include "memory/shared_slots.h"
#include "offload/capture_offload.h"
#include "sidestream/error.h"
#include "sidestream/testing/simulator.h"
#include "unit/offload/groups_by_hand.h"

namespace sidestream {
namespace {

constexpr std::size_t kBlockFrom = 4096;

/// A saved tensor: what is known of it when backward asks.
struct Saved {
  at::Tensor expected;  ///< on the host
  StorageView view;
  std::shared_ptr<SavedStorage> storage;
};

class SmallBlockTest : public GroupsByHand {
 protected:
  SmallBlockTest() : GroupsByHand({std::nullopt, 0, 0}) {}

  void begin_group() {
    group_ = std::make_unique<Group>();
    group_->scope = tree_.child(tree_.root(), "group");
    group_->block_from = kBlockFrom;
    group_->gathers = true;
  }
  /// 0.1, 1.1, ... of type `dtype`.
  [[nodiscard]] at::Tensor numbers(std::int64_t count, at::ScalarType dtype = at::kFloat) const {
    return at::arange(count, at::TensorOptions(at::kDouble)).add(0.1).to(dtype).to(runtime_->device());
  }
  Saved save(const at::Tensor& tensor) {
    Saved saved{tensor.cpu(), StorageView::capture(tensor), nullptr};
    saved.storage = std::make_shared<SavedStorage>(offload_, group_.get(), tensor.storage());
    saved.storage->to_offload = true;
    saved.storage->tensors = 1;
    group_->small.push_back(saved.storage);
    group_->small_bytes += saved.storage->bytes;
    return saved;
  }
  at::Tensor unpack(const Saved& saved) const {
    c10::Storage bytes = offload_->fetch(*saved.storage);
    return saved.view.restore(std::move(bytes), saved.storage->offset);
  }
  static std::size_t leaves(const std::vector<Saved>& all) {
    return std::accumulate(all.begin(), all.end(), std::size_t{0}, [](std::size_t bytes, const Saved& saved) {
      return bytes + (saved.storage->block != nullptr ? bytes_in_block(saved.storage->bytes) : 0);
    });
  }

  std::unique_ptr<Group> group_;
};

TEST_F(SmallBlockTest, StoragesOfAnySizeAndTypeLeaveAndComeBackAsOne) {
  begin_group();
  std::vector<Saved> all = {save(numbers(300)), save(numbers(7, at::kByte)), save(numbers(513, at::kBFloat16)),
                            save(numbers(160, at::kComplexDouble)), save(numbers(1, at::kBool))};
  offload_->group_ended(*group_);
  EXPECT_EQ(leaves(all), 1536U + 512 + 1536 + 2560 + 512);
  EXPECT_EQ(mover_->counts().offloaded_bytes, leaves(all));
  EXPECT_EQ(arena_->stats().live_leases, 1U);
  EXPECT_EQ(arena_->stats().requested, leaves(all));
  const auto& block = all[0].storage->block;
  ASSERT_NE(block, nullptr);
  for (const Saved& saved : all) {
    EXPECT_FALSE(saved.storage->device) << "its memory is free";
    EXPECT_EQ(saved.storage->block, block);
    EXPECT_EQ(saved.storage->offset % HostArena::alignment, 0U);
  }
  EXPECT_EQ(block->place, SavedStorage::Place::host);
  for (const Saved& saved : all) {
    const at::Tensor back = unpack(saved);
    EXPECT_EQ(back.sizes(), saved.expected.sizes());
    EXPECT_EQ(back.scalar_type(), saved.expected.scalar_type());
    EXPECT_TRUE(back.cpu().equal(saved.expected)) << saved.expected.scalar_type();
  }
  EXPECT_EQ(mover_->counts().reloaded_bytes, mover_->counts().offloaded_bytes);
}

TEST_F(SmallBlockTest, ViewsOfOneStorageShareItsPlace) {
  begin_group();
  const at::Tensor whole = numbers(1024).view({32, 32});
  const std::vector<at::Tensor> views = {whole.t(), whole.slice(1, 3, 9), whole.select(0, 31)};
  const Saved saved = save(whole);
  const Saved other = save(numbers(200));
  offload_->group_ended(*group_);
  EXPECT_EQ(mover_->counts().offloaded_bytes, 4096U + 1024);
  for (const at::Tensor& view : views) {
    const at::Tensor back = unpack({{}, StorageView::capture(view), saved.storage});
    EXPECT_EQ(back.strides(), view.strides());
    EXPECT_TRUE(back.cpu().equal(view.cpu()));
  }
  const at::Tensor back = unpack(saved);
  EXPECT_TRUE(back.is_alias_of(unpack({{}, StorageView::capture(whole[0]), saved.storage})));
  EXPECT_TRUE(unpack(other).cpu().equal(other.expected));
}

TEST_F(SmallBlockTest, FewerBytesStay) {
  begin_group();
  const std::vector<Saved> all = {save(numbers(512)), save(numbers(511))};
  offload_->group_ended(*group_);
  EXPECT_EQ(leaves(all), 0U);
  EXPECT_EQ(mover_->counts().offloaded_bytes, 0U);
  EXPECT_EQ(arena_->stats().pinned, 0U);
  EXPECT_TRUE(unpack(all[0]).cpu().equal(all[0].expected));
}

TEST_F(SmallBlockTest, WhatFindsNoPinnedMemoryStaysAndIsCounted) {
  pin({4096});
  begin_group();
  group_->block_bytes = 4096;
  const std::vector<Saved> all = {save(numbers(512)), save(numbers(700)), save(numbers(400))};
  offload_->group_ended(*group_);
  EXPECT_EQ(leaves(all), 2048U + 2048) << "the first and the last";
  EXPECT_EQ(all[1].storage->place, SavedStorage::Place::device);
  EXPECT_EQ(group_->refused_bytes, 2800U);
  EXPECT_EQ(mover_->counts().refused_leases, 1U);
  for (const Saved& saved : all) {
    EXPECT_TRUE(unpack(saved).cpu().equal(saved.expected));
  }
}

// A capture that saves otherwise than planned, in slots that others have at their turns.
TEST_F(SmallBlockTest, OfASharedSlotNoMoreIsCopiedThanTheBlockHas) {
  pin({4096});
  begin_group();
  group_->block_bytes = 4096;
  const std::vector<Saved> all = {save(numbers(512)), save(numbers(700))};
  SharedSlots slots(arena_);
  SharedSlots::Share share(slots);
  const std::vector<std::size_t> sizes = {4096};
  share.lease(*arena_, sizes);
  const auto capture = std::make_shared<CaptureOffload>(runtime_, mover_);
  CapturedCopies copies;
  capture->begin_forward(copies, &share);
  capture->group_ended(*group_);
  capture->end_forward();
  EXPECT_EQ(all[1].storage->place, SavedStorage::Place::device);
  ASSERT_EQ(copies.storages.size(), 1U);
  EXPECT_EQ(copies.storages[0]->bytes, 2048U) << "the first";
  std::size_t copied = 0;
  for (const CapturedCopy& copy : copies.copies) {
    EXPECT_EQ(copy.at, copied);
    copied += copy.bytes;
  }
  EXPECT_EQ(copied, 2048U);
}

TEST_F(SmallBlockTest, WithoutAnyPinnedMemoryAllStay) {
  pin({});
  begin_group();
  const std::vector<Saved> all = {save(numbers(512)), save(numbers(700))};
  offload_->group_ended(*group_);
  EXPECT_EQ(leaves(all), 0U);
  EXPECT_EQ(group_->refused_bytes, 2048U + 2800);
  EXPECT_TRUE(unpack(all[1]).cpu().equal(all[1].expected));
}

TEST_F(SmallBlockTest, WithoutDeviceMemoryForTheBlockAllStayAndNothingIsHeld) {
  begin_group();
  const std::vector<Saved> all = {save(numbers(512)), save(numbers(700))};
  runtime_->release_cached_memory();
  set_memory_limit(runtime_->device(), static_cast<std::size_t>(runtime_->memory_stats().reserved));
  std::vector<at::Tensor> rest;
  EXPECT_THROW(
      for (;;) { rest.push_back(at::empty({1024}, at::TensorOptions(at::kFloat).device(runtime_->device()))); },
      DeviceError);
  offload_->group_ended(*group_);
  set_memory_limit(runtime_->device(), std::numeric_limits<std::size_t>::max());
  EXPECT_EQ(leaves(all), 0U);
  EXPECT_EQ(arena_->stats().live_leases, 0U);
  for (const Saved& saved : all) {
    EXPECT_TRUE(unpack(saved).cpu().equal(saved.expected));
  }
}

TEST_F(SmallBlockTest, ItLivesUntilTheLastOfItsStoragesIsNeededNoMore) {
  begin_group();
  std::vector<Saved> all = {save(numbers(512)), save(numbers(700))};
  offload_->group_ended(*group_);
  EXPECT_TRUE(unpack(all[1]).cpu().equal(all[1].expected));
  all.erase(all.begin());
  EXPECT_EQ(arena_->stats().live_leases, 1U);
  EXPECT_TRUE(unpack(all[0]).cpu().equal(all[0].expected)) << "a retained graph asks again";
  EXPECT_EQ(mover_->counts().reloaded_bytes, mover_->counts().offloaded_bytes) << "it came back once";
  all.clear();
  EXPECT_EQ(arena_->stats().live_leases, 0U);
}

// On two streams that meet in nothing but the block: the gather is behind both, and who reads it is behind the gather.
TEST_F(SmallBlockTest, StreamsThatSavedItsStoragesNeedNoOrderOfTheirOwn) {
  offload_->set_window({{std::uint64_t{1} << 20, 0}, 8});  // it is read before it was let go of
  const OwnedStream streams[] = {runtime_->create_stream(), runtime_->create_stream()};
  const at::Tensor x = numbers(600);
  runtime_->synchronize_device();
  for (const bool leaves : {false, true}) {
    if (leaves) {
      offload_->set_window({{0, 0}, 0});
    }
    at::Tensor results[2];
    sim::Recording recording;
    begin_group();
    std::vector<Saved> all;
    for (const int i : {0, 1}) {
      const StreamGuard on_stream(*runtime_, streams[i]);
      const at::Tensor made = x.mul(i + 2);
      all.push_back({{}, StorageView::capture(made), nullptr});
      all.back().storage = std::make_shared<SavedStorage>(offload_, group_.get(), made.storage());
      all.back().storage->to_offload = true;
      group_->small.push_back(all.back().storage);
    }
    offload_->group_ended(*group_);
    for (const int i : {1, 0}) {
      const StreamGuard on_stream(*runtime_, streams[i]);
      results[i] = at::mul(unpack(all[i]), 2);
    }
    recording.stop();
    expect_in_every_order(recording, {results[0], results[1]}, {x.mul(4), x.mul(6)});
  }
}

}  // namespace
}  // namespace sidestream
