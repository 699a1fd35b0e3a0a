// What a program allocates and frees, on the device and pinned on the host, and what is left of it.
#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <utility>

#include "runtime/host_waits.h"
#include "sim/device/device.h"
#include "sim/device/state.h"

namespace sidestream::sim {
namespace {

Work poison_work(const Block& block) {
  Work work;
  work.kind = Work::Kind::poison;
  work.stream = block.segment->stream;
  work.name = "free";
  std::byte* begin = block.begin;
  const std::size_t bytes = block.requested;
  work.run = [begin, bytes] { std::memset(begin, poison_byte, bytes); };
  work.accesses.push_back({begin, bytes, true, true});
  return work;
}

}  // namespace

void* Device::allocate(std::size_t bytes, c10::StreamId id) {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  state_->free_unused();
  const Capture* capture = state_->stream(id).capture;
  Pool* pool = capture != nullptr ? &capture->pool : state_->memory.default_pool();
  const std::uint64_t segments = state_->memory.segments_mapped();
  std::byte* const begin = state_->memory.allocate(bytes, id, pool)->begin;
  if (capture != nullptr) {
    std::memset(begin, 0, bytes);  // see Note [Captures compute]
  } else if (state_->memory.segments_mapped() != segments) {
    host_waits::tell(c10::DeviceType::PrivateUse1, HostWait::allocation, "a segment of device memory");
  }
  return begin;
}

void Device::free(void* address) noexcept {
  if (address == nullptr) {
    return;
  }
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  Block* block = state_->memory.block_at(address);
  if (block == nullptr || !block->counted) {
    return;
  }
  if (!block->users.empty()) {
    state_->hold_back(*block);
    return;
  }
  StreamState& stream = state_->streams[static_cast<std::size_t>(block->segment->stream)];
  if (stream.capture != nullptr) {
    // Who frees on a thread that does not capture does so at any time. An engine thread of autograd keeps what it handed over last
    // until it is scheduled again, which may be in the next capture: no work of that graph, whose memory copies may have written.
    const bool captures = state_->stream(current_stream()).capture == stream.capture;
    if (captures && !stream.capture->invalidated && block->segment->pool == &stream.capture->pool) {
      stream.capture->add(stream.capture_last, std::make_shared<const Work>(poison_work(*block)));
    }
  } else if (state_->timeline.keeping() && !block->segment->pool->is_private) {
    // A private pool's block belongs to the graphs that use it, on whatever stream they are launched.
    // An operator finds its stream's work done and then writes at once, also to what it frees and takes again while it runs. So a poison
    // waits only for work that is held back.
    const bool done = state_->done(stream);
    Queued queued;
    queued.work = std::make_shared<const Work>(poison_work(*block));
    state_->enqueue(stream, std::move(queued));
    if (done) {
      state_->force(stream);
    }
  }
  state_->memory.free(block);
}

bool Device::owns(const void* address) const noexcept { return state_->memory.owns(address); }

MemoryStats Device::memory_stats() const {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  return state_->memory.stats();
}

void Device::reset_peak_memory_stats() {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  state_->memory.reset_peaks();
}

DeviceRoom Device::room() const {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  return state_->memory.room();
}

MemoryRefusal Device::latest_refusal() const {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  return state_->memory.latest_refusal();
}

void Device::take_outside(std::size_t bytes, const char* what) {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  state_->memory.take_outside(bytes, what);
}

void Device::give_back_outside(std::size_t bytes) noexcept {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  state_->memory.give_back_outside(bytes);
}

void Device::release_cached_memory() {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  state_->refuse_in_capture("release of cached memory");
  state_->timeline.drain();
  state_->free_unused();
  state_->memory.release_cached();
}

std::int64_t Device::memory_bytes() const noexcept { return static_cast<std::int64_t>(state_->memory.capacity()); }

void Device::set_memory_limit(std::size_t bytes) {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  state_->memory.set_limit(std::min(bytes, state_->memory.capacity()));
}

Pool* Device::create_pool() {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  return state_->memory.create_pool();
}

std::int64_t Device::allocated_in(const Pool& pool) const {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  return pool.allocated;
}

void Device::retain_pool(Pool* pool) noexcept {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  state_->memory.retain(pool);
}

void Device::release_pool(Pool* pool) noexcept {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  state_->memory.release(pool);
}

void* Device::allocate_pinned(std::size_t bytes) {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  state_->refuse_in_capture("allocation of pinned host memory");
  return state_->pinned.allocate(bytes);
}

void Device::free_pinned(void* data) noexcept {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  // As the driver does: queued copies may still use it.
  try {
    state_->timeline.drain();
  } catch (const std::exception&) {
  }
  if (state_->recordings > 0) {
    state_->pinned.retire(data);
  } else {
    state_->pinned.free(data);
  }
}

bool Device::pinned(const void* address, std::size_t bytes) const noexcept {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  return state_->pinned.holds(address, bytes);
}

void Device::fail_allocation(std::int64_t n) {
  const std::lock_guard lock(state_->mutex);
  state_->memory.fail_allocation(n);
}

bool Device::allocation_failed() const {
  const std::lock_guard lock(state_->mutex);
  return state_->memory.allocation_failed();
}

void Device::set_pinned_limit(std::size_t bytes) {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  state_->pinned.set_limit(bytes);
}

}  // namespace sidestream::sim
