#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include <c10/core/Device.h>

#include "sidestream/detail/export.h"

namespace sidestream {

/// The device of that name. "cuda" and "cuda:N" are GPUs. "sim" is the simulated device, which computes on the CPU: its
/// library, libsidestream_sim, is loaded from beside this one and takes LibTorch's PrivateUse1 place; the library's autograd
/// engine is installed with it. "auto" is the first GPU, or else sim: it then says so, and why, on one line through
/// LibTorch's warning handler.
/// Threads: any.
/// Throws: UsageError for another name, or where the simulator's library is missing; DeviceError for cuda without a usable
/// driver or device, and for auto where a driver is there that does not work. Both name the remedy.
[[nodiscard]] SIDESTREAM_API c10::Device find_device(const std::string& name);

/// What `sidestream info` shows of a device.
struct DeviceSummary {
  std::string name;
  std::string driver;
  std::int64_t memory_bytes = 0;
};
[[nodiscard]] SIDESTREAM_API DeviceSummary describe(c10::Device device);

/// Bytes of device memory; peaks are since the latest `reset_memory_peaks`.
struct MemoryUse {
  /// In use at one moment by tensors, by captured graphs for what they compute, and by copies under way. What graphs' pools hold
  /// and do not use then does not count. Without graphs it is `allocated`.
  std::int64_t live = 0;
  /// Of steps of an engine that replay graphs, as measured in one of them: see Report::step_peak_bytes.
  std::int64_t live_peak = 0;
  std::int64_t allocated =
      0;  ///< as LibTorch's allocator counts: tensors; of graphs only their outputs, whether in use or not
  std::int64_t allocated_peak = 0;
  std::int64_t reserved = 0;  ///< held by the allocator, free blocks and graphs' pools included
  std::int64_t reserved_peak = 0;
};
/// Threads: any. Capture: legal.
[[nodiscard]] SIDESTREAM_API MemoryUse memory_use(c10::Device device);
/// Starts the peaks anew at the present values. LibTorch's own peak statistics start anew as well, and in steps that an engine
/// measures.
SIDESTREAM_API void reset_memory_peaks(c10::Device device);
/// Gives cached, unused memory back to the device. Capture: illegal.
SIDESTREAM_API void release_cached_memory(c10::Device device);
/// Blocks until the device is idle. Capture: illegal.
SIDESTREAM_API void synchronize(c10::Device device);

/// Measured bandwidth between pinned host memory and the device, in GB/s (1e9 bytes): each way alone, and both at once.
struct LinkSpeed {
  double to_host = 0;
  double to_device = 0;
  double both = 0;
  double pinning = 0;  ///< how fast host memory is page-locked
};
/// Copies `bytes` bytes each way a few times. Blocks. Capture: illegal.
[[nodiscard]] SIDESTREAM_API LinkSpeed measure_link(c10::Device device, std::size_t bytes = std::size_t{64} << 20);

}  // namespace sidestream
