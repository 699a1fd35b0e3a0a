// The sim device's allocator against a plain model: hundreds of thousands of random allocations and frees.
#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "sim/device/allocator.h"

namespace sidestream::sim {
namespace {

constexpr int kOperations = 300'000;

class AllocatorProperty : public testing::TestWithParam<std::uint64_t> {};

TEST_P(AllocatorProperty, LiveBlocksNeverOverlapAndNothingIsLost) {
  std::mt19937_64 random(GetParam());
  CachingAllocator memory(std::size_t{4} << 30);
  const std::vector<Pool*> pools{memory.default_pool(), memory.create_pool(), memory.create_pool()};
  std::map<std::byte*, Block*> live;
  std::int64_t allocated = 0;
  for (int i = 0; i < kOperations; ++i) {
    if (live.empty() || (live.size() < 300 && random() % 2 == 0)) {
      const std::size_t bytes = 1 + random() % (std::size_t{1} << (6 + random() % 19));
      const auto stream = static_cast<c10::StreamId>(random() % 3);
      Pool* pool = pools[random() % pools.size()];
      Block* block = memory.allocate(bytes, stream, pool);
      ASSERT_GE(block->bytes, bytes);
      ASSERT_EQ(reinterpret_cast<std::uintptr_t>(block->begin) % 512, 0U);
      ASSERT_EQ(block->segment->stream, stream);
      ASSERT_EQ(block->segment->pool, pool);
      const auto [place, is_new] = live.emplace(block->begin, block);
      ASSERT_TRUE(is_new);
      if (place != live.begin()) {
        const auto before = std::prev(place);
        ASSERT_LE(before->first + before->second->bytes, block->begin);
      }
      if (const auto after = std::next(place); after != live.end()) {
        ASSERT_LE(block->begin + block->bytes, after->first);
      }
      allocated += static_cast<std::int64_t>(block->bytes);
    } else {
      const auto chosen = std::next(live.begin(), static_cast<std::ptrdiff_t>(random() % live.size()));
      allocated -= static_cast<std::int64_t>(chosen->second->bytes);
      memory.free(chosen->second);
      live.erase(chosen);
    }
    ASSERT_EQ(memory.stats().allocated, allocated);
    ASSERT_LE(memory.stats().allocated, memory.stats().reserved);
    if (random() % 5000 == 0) {
      memory.release_cached();
    }
  }
  for (const auto& [begin, block] : live) {
    memory.free(block);
  }
  memory.release(pools[1]);
  memory.release(pools[2]);
  memory.release_cached();
  EXPECT_EQ(memory.stats().allocated, 0);
  EXPECT_EQ(memory.stats().reserved, 0) << "every segment is whole again";
}

INSTANTIATE_TEST_SUITE_P(Seeds, AllocatorProperty, testing::Values(1, 2, 3));

}  // namespace
}  // namespace sidestream::sim
