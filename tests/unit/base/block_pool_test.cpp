#include "base/block_pool.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <set>
#include <vector>

#include <gtest/gtest.h>

namespace sidestream {
namespace {

TEST(BlockPool, WhatIsGivenBackIsTakenAgain) {
  BlockPool pool;
  std::set<void*> first;
  for (int i = 0; i < 10; ++i) {
    first.insert(BlockPool::take(&pool, 100));
  }
  EXPECT_EQ(first.size(), 10U);
  for (int round = 0; round < 3; ++round) {
    for (void* const block : first) {
      std::memset(block, round, BlockPool::block_bytes);
      BlockPool::give_back(block);
    }
    std::set<void*> again;
    for (int i = 0; i < 10; ++i) {
      again.insert(BlockPool::take(&pool, BlockPool::block_bytes));
    }
    EXPECT_EQ(again, first);
  }
  for (void* const block : first) {
    BlockPool::give_back(block);
  }
}

TEST(BlockPool, BlocksAreAligned) {
  BlockPool pool;
  for (BlockPool* const from : {&pool, static_cast<BlockPool*>(nullptr)}) {
    void* const block = BlockPool::take(from, 1);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block) % alignof(std::max_align_t), 0U);
    BlockPool::give_back(block);
  }
}

// This test and the next assert nothing. Only a build with the address sanitizer is sure to turn them red.
TEST(BlockPool, BlocksOutliveIt) {
  auto pool = std::make_unique<BlockPool>();
  std::vector<void*> blocks;
  for (int i = 0; i < 5; ++i) {
    blocks.push_back(BlockPool::take(pool.get(), 64));
  }
  BlockPool::give_back(blocks.back());
  blocks.pop_back();
  pool.reset();
  for (void* const block : blocks) {
    std::memset(block, 1, 64);
    BlockPool::give_back(block);
  }
}

TEST(BlockPool, WhatIsTooLargeForABlockIsTheHeaps) {
  auto pool = std::make_unique<BlockPool>();
  constexpr std::size_t kLarge = BlockPool::block_bytes + 1;
  void* const large = BlockPool::take(pool.get(), kLarge);
  std::memset(large, 1, kLarge);
  pool.reset();
  BlockPool::give_back(large);
  BlockPool::give_back(nullptr);
}

TEST(BlockPool, ObjectsLieInItsBlocks) {
  struct Counter : Pooled {
    explicit Counter(int& alive) : alive_(++alive) {}
    ~Counter() { --alive_; }
    int& alive_;
  };
  int alive = 0;
  BlockPool pool;
  void* const block = BlockPool::take(&pool, sizeof(Counter));
  BlockPool::give_back(block);
  std::unique_ptr<Counter> counter(new (&pool) Counter(alive));
  EXPECT_EQ(static_cast<void*>(counter.get()), block);
  EXPECT_EQ(alive, 1);
  counter.reset();
  EXPECT_EQ(alive, 0);
  const std::unique_ptr<Counter> on_heap(new (static_cast<BlockPool*>(nullptr)) Counter(alive));
  EXPECT_NE(static_cast<void*>(on_heap.get()), block);
  const auto shared = std::allocate_shared<int>(PoolAllocator<int>(pool), 7);
  EXPECT_EQ(*shared, 7);
}

TEST(BlockPool, AConstructorThatThrowsGivesItsBlockBack) {
  struct Thrower : Pooled {
    Thrower() { throw 1; }
  };
  BlockPool pool;
  void* const block = BlockPool::take(&pool, 1);
  BlockPool::give_back(block);
  EXPECT_THROW((void)new (&pool) Thrower, int);
  void* const again = BlockPool::take(&pool, 1);
  EXPECT_EQ(again, block);
  BlockPool::give_back(again);
}

}  // namespace
}  // namespace sidestream
