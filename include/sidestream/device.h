#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include <c10/core/Device.h>

#include "sidestream/testing/schedule.h"

namespace sidestream {

/// The device called "sim" (registered with LibTorch on first use), "cuda" or "cuda:N", or "auto": cuda where a usable driver
/// is, else sim. Throws: UsageError for another name; DeviceError for cuda without a usable driver (says which is needed).
[[nodiscard]] c10::Device find_device(const std::string& name);

/// What `sidestream info` shows of a device.
struct DeviceSummary {
  std::string name;
  std::string driver;
  std::int64_t memory_bytes = 0;
};
[[nodiscard]] DeviceSummary describe(c10::Device device);

/// Bytes of device memory. `allocated`: live tensors; `reserved`: held by the allocator, graph pools included.
struct MemoryUse {
  std::int64_t allocated = 0;
  std::int64_t allocated_peak = 0;
  std::int64_t reserved = 0;
  std::int64_t reserved_peak = 0;
};
/// Threads: any. Capture: legal.
[[nodiscard]] MemoryUse memory_use(c10::Device device);
/// Starts both peaks anew at the present values.
void reset_memory_peaks(c10::Device device);
/// Gives cached, unused memory back to the device. Capture: illegal.
void release_cached_memory(c10::Device device);
/// Blocks until the device is idle. Capture: illegal.
void synchronize(c10::Device device);

/// Measured bandwidth between pinned host memory and the device, in GB/s (1e9 bytes): each way alone, and both at once.
struct LinkSpeed {
  double to_host = 0;
  double to_device = 0;
  double both = 0;
};
/// Copies `bytes` bytes each way a few times. Blocks. Capture: illegal.
[[nodiscard]] LinkSpeed measure_link(c10::Device device, std::size_t bytes = std::size_t{64} << 20);

/// The order in which the sim device runs queued work from now on. Throws: UsageError for another device.
void set_schedule(c10::Device sim, const Schedule& schedule);

}  // namespace sidestream
