#include "sim/device/pinned.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include <sidestream/error.h>

namespace sidestream::sim {

PinnedRegistry::PinnedRegistry()
    : limit_(static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE))) {}

PinnedRegistry::~PinnedRegistry() {
  free_retired();
  while (!ranges_.empty()) {
    free(ranges_.begin()->first);
  }
}

std::byte* PinnedRegistry::allocate(std::size_t bytes) {
  const std::size_t mapped = std::max<std::size_t>(bytes, 1);
  void* data = MAP_FAILED;
  if (mapped <= limit_ - std::min(limit_, total_)) {
    data = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }
  if (data == MAP_FAILED) {
    throw DeviceError("sim device: pinned host memory exhausted: asked for " + std::to_string(bytes) + " bytes with " +
                      std::to_string(total_) +
                      " pinned; lower the host cap, offload less, or keep fewer tensors in pools");
  }
  total_ += mapped;
  auto* begin = static_cast<std::byte*>(data);
  ranges_.emplace(begin, mapped);
  return begin;
}

void PinnedRegistry::free(void* data) noexcept {
  const auto range = ranges_.find(static_cast<std::byte*>(data));
  if (range == ranges_.end()) {
    return;
  }
  total_ -= range->second;
  munmap(data, range->second);
  ranges_.erase(range);
}

void PinnedRegistry::retire(void* data) noexcept {
  const auto range = ranges_.find(static_cast<std::byte*>(data));
  if (range != ranges_.end()) {
    total_ -= range->second;
    retired_.insert(ranges_.extract(range));
  }
}

void PinnedRegistry::free_retired() noexcept {
  for (const auto& [data, bytes] : retired_) {
    munmap(data, bytes);
  }
  retired_.clear();
}

bool PinnedRegistry::holds(const void* address, std::size_t bytes) const noexcept {
  auto* begin = const_cast<std::byte*>(static_cast<const std::byte*>(address));
  auto after = ranges_.upper_bound(begin);
  if (after == ranges_.begin()) {
    return false;
  }
  const auto range = std::prev(after);
  return begin + bytes <= range->first + range->second;
}

}  // namespace sidestream::sim
