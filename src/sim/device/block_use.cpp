// Blocks that streams use beside the one they were allocated for: at::Tensor::record_stream, and autograd's own calls of it.
// Source of the rule: PyTorch c10/cuda/CUDACachingAllocator.cpp (recordStream, process_events).
#include <algorithm>

#include "runtime/device_listener.h"
#include "sim/device/state.h"
#include "sim/torch/device_guard.h"

namespace sidestream::sim {

void Device::used_on(const void* address, c10::StreamId id) noexcept {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  Block* block = state_->memory.block_at(address);
  if (block == nullptr || !block->counted || block->segment->stream == id) {
    return;
  }
  if (std::find(block->users.begin(), block->users.end(), id) == block->users.end()) {
    block->users.push_back(id);
  }
}

void Device::State::hold_back(Block& block) {
  UsedBlock& used = used_blocks.emplace_back();
  used.block = &block;
  for (const c10::StreamId id : block.users) {
    const StreamState& user = stream(id);
    used.in_capture = used.in_capture || user.capture != nullptr;
    used.until.push_back(user.last);
    used.until.insert(used.until.end(), user.waits.begin(),
                      user.waits.end());  // an event that it records now is after them
    device_listeners::freed_behind(kDeviceType, id, block.begin, block.bytes);
  }
  memory.stop_counting(&block);
}

void Device::State::free_unused() noexcept {
  if (used_blocks.empty() || recordings > 0) {
    return;
  }
  const auto in_use = [&](const UsedBlock& used) {
    return (used.in_capture && open_captures.load(std::memory_order_relaxed) > 0) ||
           !std::all_of(used.until.begin(), used.until.end(), [&](WorkId id) { return timeline.done(id); });
  };
  const auto unused = std::partition(used_blocks.begin(), used_blocks.end(), in_use);
  std::for_each(unused, used_blocks.end(), [&](const UsedBlock& used) { memory.free(used.block); });
  used_blocks.erase(unused, used_blocks.end());
}

}  // namespace sidestream::sim
