#include "base/block_pool.h"

#include <atomic>
#include <cstddef>
#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "threads/at_once.h"

namespace sidestream {
namespace {

using test::at_once;

constexpr int kBlocks = 2000;
constexpr std::size_t kWindow = 16;

/// Writes plainly: a block in two threads' hands at once is a race.
void write(void* block, int value) { *static_cast<int*>(block) = value; }

TEST(BlockPoolThreads, OneTakesAndOthersGiveBack) {
  BlockPool pool;
  std::vector<std::atomic<void*>> slots(kWindow);
  std::atomic<bool> done = false;
  at_once(4, [&](int number) {
    if (number > 0) {
      while (!done.load(std::memory_order_acquire)) {
        for (std::atomic<void*>& slot : slots) {
          if (void* const block = slot.exchange(nullptr, std::memory_order_acquire); block != nullptr) {
            write(block, number);
            BlockPool::give_back(block);
          }
        }
        std::this_thread::yield();
      }
      return;
    }
    for (int i = 0; i < kBlocks; ++i) {
      void* const block = BlockPool::take(&pool, sizeof(int));
      write(block, i);
      std::atomic<void*>& slot = slots[static_cast<std::size_t>(i) % kWindow];
      while (slot.load(std::memory_order_relaxed) != nullptr) {
        std::this_thread::yield();
      }
      slot.store(block, std::memory_order_release);
    }
    done.store(true, std::memory_order_release);
  });
  for (std::atomic<void*>& slot : slots) {
    BlockPool::give_back(slot.load());
  }
}

TEST(BlockPoolThreads, ThePoolGoesWhileBlocksAreGivenBack) {
  for (int round = 0; round < 200; ++round) {
    auto pool = std::make_unique<BlockPool>();
    std::vector<void*> blocks;
    for (int i = 0; i < 12; ++i) {
      blocks.push_back(BlockPool::take(pool.get(), sizeof(int)));
    }
    at_once(4, [&](int number) {
      if (number == 0) {
        pool.reset();
        return;
      }
      for (std::size_t i = static_cast<std::size_t>(number) - 1; i < blocks.size(); i += 3) {
        write(blocks[i], number);
        BlockPool::give_back(blocks[i]);
      }
    });
  }
}

}  // namespace
}  // namespace sidestream
