#include "graphs/sequence/graph_memory.h"

#include <optional>

#include "sidestream/error.h"

namespace sidestream {

struct GraphMemory::Kept {
  std::shared_ptr<Runtime> runtime;
  MemoryPool pool;
  std::optional<OwnedStream> capture_stream;
};

std::shared_ptr<GraphMemory> GraphMemory::of(const GraphPool& pool, c10::Device device) {
  if (pool.device() != device) {
    throw UsageError("GraphOptions::pool is a pool of " + pool.device().str() + ", the engine's device is " +
                     device.str() + "; use a pool of the engine's device");
  }
  return pool.memory_;
}

std::shared_ptr<MemoryPool> GraphMemory::pool(const std::shared_ptr<Runtime>& runtime) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Kept> kept = kept_;
  if (kept == nullptr) {
    kept = std::make_shared<Kept>(Kept{runtime, runtime->create_pool(), std::nullopt});
    if (shared()) {
      kept->capture_stream.emplace(runtime->create_stream());
      kept_ = kept;
    }
  }
  return {kept, &kept->pool};
}

SharedSlots& GraphMemory::slots(const std::shared_ptr<HostArena>& arena) {
  const std::lock_guard lock(mutex_);
  slots_.remove_if([](const SharedSlots& slots) { return slots.expired(); });
  for (SharedSlots& slots : slots_) {
    if (slots.are_of(arena)) {
      return slots;
    }
  }
  return slots_.emplace_back(arena);
}

const OwnedStream* GraphMemory::capture_stream() const noexcept {
  return kept_ == nullptr || !kept_->capture_stream ? nullptr : &*kept_->capture_stream;
}

GraphPool::GraphPool(c10::Device device)
    : device_(device), memory_(std::make_shared<GraphMemory>(GraphMemory::Use::shared)) {}

GraphPool::~GraphPool() = default;

}  // namespace sidestream
