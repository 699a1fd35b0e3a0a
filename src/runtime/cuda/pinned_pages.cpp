#include "runtime/cuda/pinned_pages.h"

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "runtime/cuda/capture_mode.h"
#include "runtime/cuda/error.h"
#include "runtime/host_limit.h"
#include "runtime/host_pages.h"
#include "runtime/numa_node.h"
#include "sidestream/error.h"

namespace sidestream::cuda {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kLarge = std::size_t{8} << 20;  ///< from here on a mapping of its own

/// Blocks that do not begin where the driver's allocation does, or that are none of its.
class Blocks {
 public:
  struct Block {
    std::byte* base;     ///< of the driver's allocation; null for mapped pages
    std::size_t mapped;  ///< bytes asked of map_pages
  };
  static Blocks& get() {
    static auto* const blocks = new Blocks();  // memory may be freed after statics are destroyed
    return *blocks;
  }
  void add(void* data, Block block) {
    const std::lock_guard lock(mutex_);
    blocks_.insert_or_assign(data, block);
  }
  [[nodiscard]] Block take(void* data) {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(data);
    if (found == blocks_.end()) {
      return {static_cast<std::byte*>(data), 0};
    }
    const Block block = found->second;
    blocks_.erase(found);
    return block;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<void*, Block> blocks_;
};

std::byte* pin_mapped(std::size_t bytes) {
  std::byte* const data = map_pages(bytes);
  if (data == nullptr) {
    return nullptr;
  }
  if (cudaHostRegister(data, bytes, cudaHostRegisterPortable) != cudaSuccess) {
    (void)cudaGetLastError();
    unmap_pages(data, bytes);
    return nullptr;
  }
  Blocks::get().add(data, {nullptr, bytes});
  return data;
}

[[noreturn]] void throw_exhausted(const std::string& why, cudaError_t status) {
  throw DeviceError("pinned host memory exhausted: " + why +
                        "; offload fewer groups, lower the host cap, or keep fewer tensors in pools",
                    status);
}

std::byte* pin_by_driver(std::size_t bytes) {
  void* data = nullptr;
  const auto status = cudaHostAlloc(&data, bytes, cudaHostAllocPortable);
  if (status == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    throw_exhausted("cudaHostAlloc refused " + std::to_string(bytes) + " bytes", status);
  }
  check(status, "cudaHostAlloc", "pinned host memory");
  return static_cast<std::byte*>(data);
}

/// Of the current device.
std::optional<int> near_node() {
  int device = 0;
  char bus_id[32] = {};
  if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), device) != cudaSuccess) {
    (void)cudaGetLastError();
    return std::nullopt;
  }
  return numa_node_of(bus_id);
}

std::byte* page_begin(std::byte* address) {
  return address + (kPage - reinterpret_cast<std::uintptr_t>(address) % kPage) % kPage;
}

}  // namespace

std::byte* pin(std::size_t bytes) {
  // Another thread may capture in the driver's global error mode, which forbids this here.
  const RelaxedCapture relaxed;
  const PreferNode near_device(near_node());
  if (bytes >= kLarge) {
    if (const auto left = host_bytes_left(); left && bytes > *left) {  // to touch it would be the end of a process
      throw_exhausted(
          std::to_string(bytes) + " bytes asked for, the system has " + std::to_string(*left) + " available",
          cudaErrorMemoryAllocation);
    }
    if (std::byte* const data = pin_mapped(bytes); data != nullptr) {
      return data;
    }
  }
  std::byte* base = pin_by_driver(bytes);
  // The driver packs small blocks; one that does not start on a page is taken again with room to move its start.
  std::byte* data = page_begin(base);
  if (data != base) {
    check(cudaFreeHost(base), "cudaFreeHost", "pinned host memory");
    base = pin_by_driver(bytes + kPage - 1);
    data = page_begin(base);
    Blocks::get().add(data, {base, 0});
  }
  return data;
}

cudaError_t unpin(void* data) noexcept {
  const Blocks::Block block = Blocks::get().take(data);
  if (block.base != nullptr) {
    return cudaFreeHost(block.base);
  }
  const cudaError_t status = cudaHostUnregister(data);
  unmap_pages(static_cast<std::byte*>(data), block.mapped);
  return status;
}

}  // namespace sidestream::cuda
