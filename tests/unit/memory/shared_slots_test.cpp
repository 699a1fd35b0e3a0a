// Slots that several users of one arena have by turns.
#include "memory/shared_slots.h"

#include <cstddef>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "unit/memory/fake_runtime.h"

namespace sidestream {
namespace {

class SharedSlotsTest : public testing::Test {
 protected:
  using Share = SharedSlots::Share;
  using Parts = SharedSlots::Parts;

  void lease(Share& share, const std::vector<std::size_t>& sizes) {
    arena_->prepare(sizes);
    share.lease(*arena_, sizes);
  }
  static std::vector<std::size_t> sizes_of(const Parts& parts) {
    std::vector<std::size_t> sizes;
    for (const SharedSlots::Part& part : parts) {
      sizes.push_back(part.bytes);
    }
    return sizes;
  }
  [[nodiscard]] std::size_t leased() const { return arena_->stats().leased; }

  test::FakeRuntime runtime_;
  std::shared_ptr<HostArena> arena_ = std::make_shared<HostArena>(runtime_, 1 << 20);
  SharedSlots slots_{arena_};
};

using Sizes = std::vector<std::size_t>;

TEST_F(SharedSlotsTest, AUserTakesWhatOthersLeasedAndLeasesTheRest) {
  Share first(slots_);
  EXPECT_EQ(first.room(), 0U);
  lease(first, {1024, 2048});
  const Parts a = first.take(1000);
  const Parts b = first.take(2048);
  EXPECT_EQ(sizes_of(a), (Sizes{1000}));
  EXPECT_EQ(sizes_of(b), (Sizes{2048}));
  EXPECT_EQ(first.room(), 0U);

  Share second(slots_);
  EXPECT_EQ(second.room(), 3072U);
  lease(second, {512});
  EXPECT_EQ(leased(), 3584U) << "what the larger one needs";
  const Parts over_both = second.take(1500);
  ASSERT_EQ(sizes_of(over_both), (Sizes{1024, 476}));
  EXPECT_EQ(over_both[0].data, a[0].data);
  EXPECT_EQ(over_both[1].data, b[0].data);
  const Parts behind = second.take(2048);
  ASSERT_EQ(sizes_of(behind), (Sizes{1536, 512}));
  EXPECT_EQ(behind[0].data, b[0].data + 512) << "as far as the one before is aligned";
  EXPECT_EQ(second.room(), 0U);
}

TEST_F(SharedSlotsTest, MoreThanThereIsRoomForTakesNothing) {
  Share share(slots_);
  lease(share, {1024});
  EXPECT_TRUE(share.take(1025).empty());
  EXPECT_EQ(sizes_of(share.take(1)), (Sizes{1}));
  EXPECT_TRUE(share.take(513).empty());
  EXPECT_EQ(sizes_of(share.take(512)), (Sizes{512}));
}

TEST_F(SharedSlotsTest, ASlotGoesBackWithTheLastThatTookOfIt) {
  Parts of_large;
  Parts of_small;
  {
    Share large(slots_);
    lease(large, {1024, 2048});
    of_large = large.take(3072);
  }
  {
    Share small(slots_);
    of_small = small.take(512);
  }
  EXPECT_EQ(leased(), 3072U);
  of_large.clear();
  EXPECT_EQ(leased(), 1024U) << "the small one has a part of the first";
  EXPECT_EQ(Share(slots_).room(), 1024U);
  of_small.clear();
  EXPECT_EQ(leased(), 0U);
  EXPECT_EQ(Share(slots_).room(), 0U);
}

TEST_F(SharedSlotsTest, WhatNobodyTookGoesBackWithTheShare) {
  {
    Share share(slots_);
    lease(share, {1024});
  }
  EXPECT_EQ(leased(), 0U);
}

TEST_F(SharedSlotsTest, AreOfOneArena) {
  const auto other = std::make_shared<HostArena>(runtime_, 1 << 20);
  EXPECT_TRUE(slots_.are_of(arena_));
  EXPECT_FALSE(slots_.are_of(other));
  EXPECT_FALSE(slots_.expired());
  arena_.reset();
  EXPECT_TRUE(slots_.expired());
}

}  // namespace
}  // namespace sidestream
