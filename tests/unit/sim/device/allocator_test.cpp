#include <cstdint>

#include <gtest/gtest.h>
#include <sidestream/error.h>

#include "sim/device/allocator.h"

namespace sidestream::sim {
namespace {

constexpr std::size_t kib = 1024;
constexpr std::size_t mib = 1024 * kib;

class AllocatorTest : public testing::Test {
 protected:
  Block* take(std::size_t bytes, c10::StreamId stream = 0, Pool* pool = nullptr) {
    return memory_.allocate(bytes, stream, pool != nullptr ? pool : memory_.default_pool());
  }
  CachingAllocator memory_{1024 * mib};
};

TEST_F(AllocatorTest, SizesRoundUpTo512) {
  EXPECT_EQ(take(1)->bytes, 512U);
  EXPECT_EQ(take(513)->bytes, 1024U);
  EXPECT_EQ(memory_.stats().allocated, 1536);
}

TEST_F(AllocatorTest, SmallBlocksShareASegmentOfTwoMebibytes) {
  Block* one = take(1000);
  Block* two = take(1 * mib);
  EXPECT_EQ(one->segment, two->segment);
  EXPECT_EQ(memory_.stats().reserved, static_cast<std::int64_t>(2 * mib));
}

TEST_F(AllocatorTest, LargeBlocksTakeSegmentsAsCudaDoes) {
  (void)take(5 * mib);
  EXPECT_EQ(memory_.stats().reserved, static_cast<std::int64_t>(20 * mib));
  (void)take(31 * mib);
  EXPECT_EQ(memory_.stats().reserved, static_cast<std::int64_t>(52 * mib));
}

TEST_F(AllocatorTest, ALargeRestIsSplitOffAndASmallOneIsNot) {
  EXPECT_EQ(take(9 * mib + 512 * kib)->bytes, 9 * mib + 512 * kib);
  EXPECT_EQ(take(9 * mib + 512 * kib)->bytes, 10 * mib + 512 * kib) << "a rest of one mebibyte stays with the block";
  EXPECT_EQ(memory_.stats().reserved, static_cast<std::int64_t>(20 * mib));
}

TEST_F(AllocatorTest, FreedNeighboursCoalesceInEitherOrder) {
  for (const bool forwards : {true, false}) {
    Block* a = take(300 * kib);
    Block* b = take(300 * kib);
    Block* c = take(300 * kib);
    auto* const begin = a->begin;
    EXPECT_EQ(b->begin, a->begin + 300 * kib);
    memory_.free(forwards ? a : c);
    memory_.free(b);
    memory_.free(forwards ? c : a);
    Block* whole = take(1 * mib);
    EXPECT_EQ(whole->begin, begin);
    EXPECT_EQ(memory_.stats().reserved, static_cast<std::int64_t>(2 * mib));
    memory_.free(whole);
  }
}

TEST_F(AllocatorTest, TheBestFittingBlockIsTaken) {
  Block* big = take(400 * kib);
  Block* between = take(512);
  Block* fits = take(100 * kib);
  Block* after = take(512);
  auto* const wanted = fits->begin;
  memory_.free(big);
  memory_.free(fits);
  EXPECT_EQ(take(90 * kib)->begin, wanted);
  memory_.free(between);
  memory_.free(after);
}

TEST_F(AllocatorTest, ABlockIsReusedOnItsStreamOnly) {
  Block* block = take(4 * kib, 1);
  auto* const begin = block->begin;
  memory_.free(block);
  EXPECT_NE(take(4 * kib, 0)->begin, begin);
  EXPECT_NE(take(4 * kib, 2)->begin, begin);
  EXPECT_EQ(take(4 * kib, 1)->begin, begin);
}

TEST_F(AllocatorTest, APrivatePoolSharesNothing) {
  Pool* pool = memory_.create_pool();
  Block* inside = take(4 * kib, 0, pool);
  Block* outside = take(4 * kib);
  EXPECT_NE(inside->segment, outside->segment);
  auto* const begin = inside->begin;
  memory_.free(inside);
  EXPECT_NE(take(4 * kib)->begin, begin);
  EXPECT_EQ(take(4 * kib, 0, pool)->begin, begin);
}

TEST_F(AllocatorTest, PeaksHoldUntilReset) {
  Block* block = take(30 * mib);
  memory_.free(block);
  EXPECT_EQ(memory_.stats().allocated, 0);
  EXPECT_EQ(memory_.stats().allocated_peak, static_cast<std::int64_t>(30 * mib));
  memory_.release_cached();
  EXPECT_EQ(memory_.stats().reserved, 0);
  EXPECT_EQ(memory_.stats().reserved_peak, static_cast<std::int64_t>(30 * mib));
  memory_.reset_peaks();
  EXPECT_EQ(memory_.stats().allocated_peak, 0);
  EXPECT_EQ(memory_.stats().reserved_peak, 0);
}

TEST_F(AllocatorTest, APoolsMemoryStaysUntilItsLastReferenceIsGone) {
  Pool* pool = memory_.create_pool();
  memory_.retain(pool);
  memory_.free(take(4 * kib, 0, pool));
  memory_.release(pool);
  memory_.release_cached();
  EXPECT_EQ(memory_.stats().reserved, static_cast<std::int64_t>(2 * mib)) << "a graph still holds the pool";
  memory_.release(pool);
  memory_.release_cached();
  EXPECT_EQ(memory_.stats().reserved, 0);
}

TEST_F(AllocatorTest, ADeadPoolWaitsForItsLentBlocks) {
  Pool* pool = memory_.create_pool();
  Block* block = take(4 * kib, 0, pool);
  memory_.release(pool);
  memory_.release_cached();
  EXPECT_GT(memory_.stats().reserved, 0);
  memory_.free(block);
  memory_.release_cached();
  EXPECT_EQ(memory_.stats().reserved, 0);
}

TEST_F(AllocatorTest, CachedMemoryIsGivenBackBeforeTheDeviceIsFull) {
  memory_.set_limit(64 * mib);
  memory_.free(take(40 * mib, 1));
  Block* block = take(60 * mib, 2);
  EXPECT_EQ(block->bytes, 60 * mib);
  EXPECT_THROW((void)take(10 * mib), DeviceError);
  memory_.free(block);
  EXPECT_NO_THROW((void)take(10 * mib));
}

TEST_F(AllocatorTest, BlocksAreFoundByTheirStart) {
  Block* block = take(4 * kib);
  EXPECT_EQ(memory_.block_at(block->begin), block);
  EXPECT_EQ(memory_.block_at(block->begin + 512), nullptr);
  EXPECT_EQ(memory_.segment_of(block->begin + 512), block->segment);
  EXPECT_FALSE(memory_.owns(&block));
}

}  // namespace
}  // namespace sidestream::sim
