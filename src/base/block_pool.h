#pragma once
#include <atomic>
#include <cstddef>
#include <memory>
#include <new>
#include <utility>

namespace sidestream {

/// Small blocks of memory that are used again and again: those that one step takes, and that are given back by whichever thread lets
/// go of them, serve the next step, so that steady steps take none from the heap. Blocks may outlive the pool.
/// Threads: `take`, and the pool's end, one at a time; `give_back` any.
class BlockPool {
 public:
  /// Larger ones come from the heap, and go there.
  static constexpr std::size_t block_bytes = 256;

  BlockPool() : core_(new Core) {}
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;
  ~BlockPool() {
    const std::size_t here = drop(core_->free) + drop(core_->returned.exchange(&closed_, std::memory_order_acq_rel));
    core_->leave(static_cast<std::ptrdiff_t>(core_->made - here));
  }

  /// `pool`: null takes it from the heap.
  [[nodiscard]] static void* take(BlockPool* pool, std::size_t bytes) {
    if (pool == nullptr || bytes > block_bytes) {
      return make(nullptr, bytes) + 1;
    }
    Core& core = *pool->core_;
    if (core.free == nullptr) {
      core.free = core.returned.exchange(nullptr, std::memory_order_acquire);
    }
    if (core.free == nullptr) {
      Block* const block = make(&core, block_bytes);
      ++core.made;
      return block + 1;
    }
    Block* const block = core.free;
    core.free = block->next;
    return block + 1;
  }

  /// Keeps `object` alive until the pool and all its blocks have gone.
  void keep(std::shared_ptr<const void> object) noexcept { core_->kept = std::move(object); }

  static void give_back(void* memory) noexcept {
    if (memory == nullptr) {
      return;
    }
    Block* const block = static_cast<Block*>(memory) - 1;
    Core* const core = block->core;
    if (core == nullptr) {
      ::operator delete(block);
      return;
    }
    Block* head = core->returned.load(std::memory_order_relaxed);
    do {
      if (head == &closed_) {
        ::operator delete(block);
        core->leave(-1);
        return;
      }
      block->next = head;
    } while (!core->returned.compare_exchange_weak(head, block, std::memory_order_release, std::memory_order_relaxed));
  }

 private:
  struct Core;
  struct alignas(std::max_align_t) Block {
    Core* core;   ///< null: the heap's
    Block* next;  ///< while the block is free
  };
  struct Core {
    Block* free = nullptr;  ///< for the thread that takes
    std::atomic<Block*> returned{nullptr};
    std::size_t made = 0;
    std::atomic<std::ptrdiff_t> strays{0};  ///< once the pool has gone: blocks that are out there
    std::shared_ptr<const void> kept;

    /// Deletes this object when no stray is left: do not use it after the call.
    void leave(std::ptrdiff_t more) noexcept {
      if (strays.fetch_add(more, std::memory_order_acq_rel) + more == 0) {
        delete this;
      }
    }
  };

  static Block* make(Core* core, std::size_t bytes) {
    return ::new (::operator new(sizeof(Block) + bytes)) Block{core, nullptr};
  }
  static std::size_t drop(Block* block) noexcept {
    std::size_t dropped = 0;
    for (; block != nullptr; ++dropped) {
      ::operator delete(std::exchange(block, block->next));
    }
    return dropped;
  }

  static inline constinit Block closed_{nullptr, nullptr};  ///< stands in `returned` once the pool has gone
  Core* core_;
};

/// `new (pool) T` lies in a block of that pool, where T derives from this; on the heap where `pool` is null.
struct Pooled {
  [[nodiscard]] static void* operator new(std::size_t bytes, BlockPool* pool) { return BlockPool::take(pool, bytes); }
  static void operator delete(void* memory) noexcept { BlockPool::give_back(memory); }
  static void operator delete(void* memory, BlockPool* /*pool*/) noexcept { BlockPool::give_back(memory); }
};

/// For std::allocate_shared: what is shared lies in a block of the pool. Deallocates also behind the pool's end.
template <class T>
class PoolAllocator {
 public:
  using value_type = T;

  explicit PoolAllocator(BlockPool& pool) noexcept : pool_(&pool) {}
  template <class Other>
  PoolAllocator(const PoolAllocator<Other>& other) noexcept : pool_(other.pool_) {}  // NOLINT: as allocators are

  [[nodiscard]] T* allocate(std::size_t count) { return static_cast<T*>(BlockPool::take(pool_, count * sizeof(T))); }
  void deallocate(T* memory, std::size_t /*count*/) noexcept { BlockPool::give_back(memory); }

  template <class Other>
  bool operator==(const PoolAllocator<Other>& other) const noexcept {
    return pool_ == other.pool_;
  }

 private:
  template <class Other>
  friend class PoolAllocator;
  BlockPool* pool_;
};

}  // namespace sidestream
