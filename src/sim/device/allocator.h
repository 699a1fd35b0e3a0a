#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include "runtime/runtime.h"
#include "sim/device/memory_image.h"

namespace sidestream::sim {

struct Pool;
struct Segment;

/// A piece of a segment: lent, or free in its pool.
struct Block {
  std::byte* begin = nullptr;
  std::size_t bytes = 0;
  std::size_t requested = 0;  ///< rounded to the smallest block; what a poison covers
  Segment* segment = nullptr;
  Block* previous = nullptr;
  Block* next = nullptr;
  bool lent = false;
  bool counted = false;                      ///< among the allocated bytes
  c10::SmallVector<c10::StreamId, 2> users;  ///< streams beside the segment's that use it (record_stream)
};

/// A range taken from the device for one stream and pool; it is given back whole.
struct Segment {
  std::byte* begin = nullptr;
  std::size_t bytes = 0;
  std::size_t lent = 0;  ///< bytes from the start that were ever lent
  c10::StreamId stream = 0;
  Pool* pool = nullptr;
  Block* first = nullptr;
};

/// Free blocks of one pool. The default pool has no owner; a private one lives until its handle and its last graph die.
struct Pool {
  struct BestFit {
    bool operator()(const Block* a, const Block* b) const noexcept;
  };
  using FreeBlocks = std::set<Block*, BestFit>;

  FreeBlocks small;
  FreeBlocks large;
  std::set<Segment*> segments;
  std::int64_t allocated = 0;    ///< its part of the allocated bytes
  std::uint32_t references = 0;  ///< handle, captures and graphs
  bool is_private = false;
  /// What the captures so far computed, for later captures to compute on; dropped at a launch.
  std::vector<MemoryImage> captured;
  std::thread::id captured_by;
};

/// CUDA's caching allocator over one reserved address range. Rounds to 512 bytes. Segments are of 2 MiB for blocks up to 1 MiB, of 20 MiB
/// for blocks up to 10 MiB, else rounded to 2 MiB. Best fit, split, coalesce.
/// Threads: under the caller's lock, except `owns`; `segment_of` needs it too. Source: PyTorch c10/cuda/CUDACachingAllocator.cpp.
class CachingAllocator {
 public:
  /// Reserves addresses, not memory. Throws: DeviceError.
  explicit CachingAllocator(std::size_t capacity);
  CachingAllocator(const CachingAllocator&) = delete;
  CachingAllocator& operator=(const CachingAllocator&) = delete;
  ~CachingAllocator();

  /// Throws: DeviceError that says how much is used when the device is full, after giving cached memory back.
  [[nodiscard]] Block* allocate(std::size_t bytes, c10::StreamId stream, Pool* pool);
  void free(Block* block) noexcept;
  /// No longer counted as allocated, but still lent: other streams use it. `free` follows.
  void stop_counting(Block* block) noexcept;

  [[nodiscard]] Pool* default_pool() noexcept { return &default_pool_; }
  [[nodiscard]] Pool* create_pool();
  void retain(Pool* pool) noexcept { ++pool->references; }
  /// At the last reference the pool's unused segments become cached memory without an owner, which release_cached frees.
  void release(Pool* pool) noexcept;
  void release_cached() noexcept;

  [[nodiscard]] bool owns(const void* address) const noexcept {
    return address >= base_ && address < base_ + capacity_;
  }
  /// The block that starts at `address`, or null.
  [[nodiscard]] Block* block_at(const void* address) const noexcept;
  /// The segment that holds `address`, or null.
  [[nodiscard]] Segment* segment_of(const void* address) const noexcept;
  template <typename Visit>
  void for_each_segment(Visit&& visit) const {
    for (const auto& entry : segments_) {
      visit(*entry.second);
    }
  }

  /// Bytes of the device for what is no tensor. Throws: as `allocate`, saying `what` finds no room.
  void take_outside(std::size_t bytes, const char* what);
  void give_back_outside(std::size_t bytes) noexcept { outside_ -= bytes; }

  [[nodiscard]] const MemoryStats& stats() const noexcept { return stats_; }
  [[nodiscard]] DeviceRoom room() const noexcept;
  [[nodiscard]] MemoryRefusal latest_refusal() const noexcept { return refusal_; }
  void reset_peaks() noexcept;
  /// How often memory was taken from the device.
  [[nodiscard]] std::uint64_t segments_mapped() const noexcept { return segments_mapped_; }
  [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }
  /// Segments, and what is no tensor, beyond this many bytes fail, as on a smaller device.
  void set_limit(std::size_t bytes) noexcept { limit_ = bytes; }
  /// The allocation number `n` from here on fails, once; none if negative.
  void fail_allocation(std::int64_t n) noexcept {
    until_failure_ = n;
    failed_ = false;
  }
  [[nodiscard]] bool allocation_failed() const noexcept { return failed_; }

 private:
  void release_ranges() noexcept;
  [[nodiscard]] bool fits(std::size_t bytes) const noexcept;
  /// `segment`: what it would have taken of the device.
  [[noreturn]] void refuse(const char* what, std::size_t bytes, std::size_t segment);
  [[nodiscard]] Block* take_free(Pool::FreeBlocks& blocks, std::size_t bytes, c10::StreamId stream);
  [[nodiscard]] Segment* map_segment(std::size_t bytes, c10::StreamId stream, Pool* pool);
  void unmap_segment(Segment* segment) noexcept;
  void release_unused(Pool& pool) noexcept;
  [[nodiscard]] Block* make_block(Segment* segment, std::byte* begin, std::size_t bytes);
  void drop_block(Block* block) noexcept;
  void merge_with_next(Block* block) noexcept;
  [[nodiscard]] static bool is_small(const Segment& segment) noexcept;

  std::size_t capacity_;
  std::size_t limit_;
  std::int64_t until_failure_ = -1;
  bool failed_ = false;
  std::byte* base_ = nullptr;
  Block** starts_ = nullptr;  // one entry a smallest block, reserved as the range is
  Pool default_pool_;
  std::set<std::unique_ptr<Pool>> pools_;
  std::map<const std::byte*, std::unique_ptr<Segment>> segments_;
  std::map<std::byte*, std::size_t> free_ranges_;
  std::uint64_t segments_mapped_ = 0;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<Block*> spare_blocks_;
  MemoryStats stats_;
  std::size_t outside_ = 0;
  MemoryRefusal refusal_;
};

}  // namespace sidestream::sim
