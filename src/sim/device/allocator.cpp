#include "sim/device/allocator.h"

#include <sys/mman.h>

#include <algorithm>
#include <string>
#include <tuple>

#include <sidestream/error.h>

namespace sidestream::sim {
namespace {

constexpr std::size_t smallest_block = 512;
constexpr std::size_t small_request = std::size_t{1} << 20;
constexpr std::size_t small_segment = std::size_t{2} << 20;
constexpr std::size_t medium_request = std::size_t{10} << 20;
constexpr std::size_t medium_segment = std::size_t{20} << 20;
constexpr std::size_t large_rounding = std::size_t{2} << 20;

std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

std::size_t segment_bytes(std::size_t bytes) {
  if (bytes <= small_request) {
    return small_segment;
  }
  return bytes < medium_request ? medium_segment : round_up(bytes, large_rounding);
}

void* reserve(std::size_t bytes) {
  void* range = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return range == MAP_FAILED ? nullptr : range;
}

}  // namespace

bool Pool::BestFit::operator()(const Block* a, const Block* b) const noexcept {
  return std::tie(a->segment->stream, a->bytes, a->begin) < std::tie(b->segment->stream, b->bytes, b->begin);
}

CachingAllocator::CachingAllocator(std::size_t capacity) : capacity_(capacity), limit_(capacity) {
  base_ = static_cast<std::byte*>(reserve(capacity_));
  starts_ = static_cast<Block**>(reserve(capacity_ / smallest_block * sizeof(Block*)));
  if (base_ == nullptr || starts_ == nullptr) {
    release_ranges();
    throw DeviceError("sim device: cannot reserve " + std::to_string(capacity_ >> 20) +
                      " MiB of addresses; raise the limit on virtual memory (ulimit -v)");
  }
  free_ranges_[base_] = capacity_;
}

CachingAllocator::~CachingAllocator() { release_ranges(); }

void CachingAllocator::release_ranges() noexcept {
  if (base_ != nullptr) {
    munmap(base_, capacity_);
  }
  if (starts_ != nullptr) {
    munmap(starts_, capacity_ / smallest_block * sizeof(Block*));
  }
}

bool CachingAllocator::is_small(const Segment& segment) noexcept { return segment.bytes == small_segment; }

Block* CachingAllocator::make_block(Segment* segment, std::byte* begin, std::size_t bytes) {
  if (spare_blocks_.empty()) {
    blocks_.push_back(std::make_unique<Block>());
    spare_blocks_.push_back(blocks_.back().get());
  }
  Block* block = spare_blocks_.back();
  spare_blocks_.pop_back();
  *block = Block{};
  block->segment = segment;
  block->begin = begin;
  block->bytes = bytes;
  starts_[(begin - base_) / smallest_block] = block;
  return block;
}

void CachingAllocator::drop_block(Block* block) noexcept {
  starts_[(block->begin - base_) / smallest_block] = nullptr;
  spare_blocks_.push_back(block);
}

Block* CachingAllocator::take_free(Pool::FreeBlocks& blocks, std::size_t bytes, c10::StreamId stream) {
  Segment key_segment;
  key_segment.stream = stream;
  Block key;
  key.segment = &key_segment;
  key.bytes = bytes;
  const auto found = blocks.lower_bound(&key);
  if (found == blocks.end() || (*found)->segment->stream != stream) {
    return nullptr;
  }
  Block* block = *found;
  blocks.erase(found);
  return block;
}

Segment* CachingAllocator::map_segment(std::size_t bytes, c10::StreamId stream, Pool* pool) {
  if (!fits(bytes)) {
    return nullptr;
  }
  const auto range = std::find_if(free_ranges_.begin(), free_ranges_.end(),
                                  [&](const auto& candidate) { return candidate.second >= bytes; });
  if (range == free_ranges_.end()) {
    return nullptr;
  }
  std::byte* begin = range->first;
  const std::size_t left = range->second - bytes;
  free_ranges_.erase(range);
  if (left > 0) {
    free_ranges_[begin + bytes] = left;
  }
  auto segment = std::make_unique<Segment>();
  segment->begin = begin;
  segment->bytes = bytes;
  segment->stream = stream;
  segment->pool = pool;
  segment->first = make_block(segment.get(), begin, bytes);
  Segment* made = segment.get();
  pool->segments.insert(made);
  segments_.emplace(begin, std::move(segment));
  ++segments_mapped_;
  stats_.reserved += static_cast<std::int64_t>(bytes);
  stats_.reserved_peak = std::max(stats_.reserved_peak, stats_.reserved);
  return made;
}

void CachingAllocator::unmap_segment(Segment* segment) noexcept {
  madvise(segment->begin, segment->bytes, MADV_DONTNEED);
  stats_.reserved -= static_cast<std::int64_t>(segment->bytes);
  segment->pool->segments.erase(segment);
  drop_block(segment->first);
  auto range = free_ranges_.emplace(segment->begin, segment->bytes).first;
  const auto after = std::next(range);
  if (after != free_ranges_.end() && range->first + range->second == after->first) {
    range->second += after->second;
    free_ranges_.erase(after);
  }
  if (range != free_ranges_.begin()) {
    const auto before = std::prev(range);
    if (before->first + before->second == range->first) {
      before->second += range->second;
      free_ranges_.erase(range);
    }
  }
  segments_.erase(segment->begin);
}

bool CachingAllocator::fits(std::size_t bytes) const noexcept {
  return static_cast<std::size_t>(stats_.reserved) + outside_ + bytes <= limit_;
}

DeviceRoom CachingAllocator::room() const noexcept {
  const auto outside = static_cast<std::int64_t>(outside_);
  return {std::max<std::int64_t>(0, static_cast<std::int64_t>(limit_) - stats_.reserved - outside), outside};
}

void CachingAllocator::take_outside(std::size_t bytes, const char* what) {
  if (!fits(bytes)) {
    release_cached();
  }
  if (!fits(bytes)) {
    refuse(what, bytes, bytes);
  }
  outside_ += bytes;
}

void CachingAllocator::refuse(const char* what, std::size_t bytes, std::size_t segment) {
  ++stats_.refusals;
  refusal_ = {static_cast<std::int64_t>(segment), stats_.reserved, room().free};
  throw DeviceError("sim device: out of memory: " + std::string(what) + " asked for " + std::to_string(bytes) +
                    " bytes, " + std::to_string(stats_.allocated) + " allocated and " +
                    std::to_string(stats_.reserved) + " reserved of " + std::to_string(limit_) +
                    "; free tensors, offload more or use a smaller batch");
}

Block* CachingAllocator::allocate(std::size_t bytes, c10::StreamId stream, Pool* pool) {
  if (until_failure_ >= 0 && until_failure_-- == 0) {
    failed_ = true;
    refuse("a tensor", bytes, segment_bytes(round_up(bytes, smallest_block)));
  }
  const std::size_t rounded = round_up(std::max<std::size_t>(bytes, 1), smallest_block);
  const bool small = rounded <= small_request;
  auto& free_blocks = small ? pool->small : pool->large;
  Block* block = take_free(free_blocks, rounded, stream);
  if (block == nullptr) {
    Segment* segment = map_segment(segment_bytes(rounded), stream, pool);
    if (segment == nullptr) {
      release_cached();
      segment = map_segment(segment_bytes(rounded), stream, pool);
    }
    if (segment == nullptr) {
      refuse("a tensor", bytes, segment_bytes(round_up(bytes, smallest_block)));
    }
    block = segment->first;
  }
  const std::size_t rest = block->bytes - rounded;
  if (small ? rest >= smallest_block : rest > small_request) {
    Block* remainder = make_block(block->segment, block->begin + rounded, rest);
    remainder->previous = block;
    remainder->next = block->next;
    if (block->next != nullptr) {
      block->next->previous = remainder;
    }
    block->next = remainder;
    block->bytes = rounded;
    free_blocks.insert(remainder);
  }
  block->lent = block->counted = true;
  block->requested = rounded;
  Segment& segment = *block->segment;
  segment.lent = std::max(segment.lent, static_cast<std::size_t>(block->begin - segment.begin) + rounded);
  stats_.allocated += static_cast<std::int64_t>(block->bytes);
  pool->allocated += static_cast<std::int64_t>(block->bytes);
  stats_.allocated_peak = std::max(stats_.allocated_peak, stats_.allocated);
  return block;
}

void CachingAllocator::merge_with_next(Block* block) noexcept {
  Block* next = block->next;
  block->bytes += next->bytes;
  block->next = next->next;
  if (next->next != nullptr) {
    next->next->previous = block;
  }
  drop_block(next);
}

void CachingAllocator::stop_counting(Block* block) noexcept {
  if (block->counted) {
    stats_.allocated -= static_cast<std::int64_t>(block->bytes);
    block->segment->pool->allocated -= static_cast<std::int64_t>(block->bytes);
    block->counted = false;
  }
}

void CachingAllocator::free(Block* block) noexcept {
  stop_counting(block);
  block->lent = false;
  block->users.clear();
  Pool& pool = *block->segment->pool;
  auto& free_blocks = is_small(*block->segment) ? pool.small : pool.large;
  if (block->next != nullptr && !block->next->lent) {
    free_blocks.erase(block->next);
    merge_with_next(block);
  }
  if (block->previous != nullptr && !block->previous->lent) {
    block = block->previous;
    free_blocks.erase(block);
    merge_with_next(block);
  }
  free_blocks.insert(block);
}

Pool* CachingAllocator::create_pool() {
  auto pool = std::make_unique<Pool>();
  pool->is_private = true;
  pool->references = 1;
  Pool* made = pool.get();
  pools_.insert(std::move(pool));
  return made;
}

void CachingAllocator::release(Pool* pool) noexcept {
  if (pool->references > 0) {
    --pool->references;
  }
}

void CachingAllocator::release_unused(Pool& pool) noexcept {
  for (auto* free_blocks : {&pool.small, &pool.large}) {
    for (auto block = free_blocks->begin(); block != free_blocks->end();) {
      Block* candidate = *block;
      if (candidate->previous == nullptr && candidate->next == nullptr) {
        block = free_blocks->erase(block);
        unmap_segment(candidate->segment);
      } else {
        ++block;
      }
    }
  }
}

void CachingAllocator::release_cached() noexcept {
  release_unused(default_pool_);
  for (auto pool = pools_.begin(); pool != pools_.end();) {
    if ((*pool)->references == 0) {
      release_unused(**pool);
    }
    pool = (*pool)->references == 0 && (*pool)->segments.empty() ? pools_.erase(pool) : std::next(pool);
  }
}

Block* CachingAllocator::block_at(const void* address) const noexcept {
  if (!owns(address)) {
    return nullptr;
  }
  Block* block = starts_[(static_cast<const std::byte*>(address) - base_) / smallest_block];
  return block != nullptr && block->begin == address ? block : nullptr;
}

Segment* CachingAllocator::segment_of(const void* address) const noexcept {
  auto after = segments_.upper_bound(static_cast<const std::byte*>(address));
  if (after == segments_.begin()) {
    return nullptr;
  }
  Segment* segment = std::prev(after)->second.get();
  return address < segment->begin + segment->bytes ? segment : nullptr;
}

void CachingAllocator::reset_peaks() noexcept {
  stats_.allocated_peak = stats_.allocated;
  stats_.reserved_peak = stats_.reserved;
}

}  // namespace sidestream::sim
