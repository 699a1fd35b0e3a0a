#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include <c10/core/Device.h>

#include "sidestream/detail/export.h"

namespace sidestream {

/// Finds a device by its name and makes it ready for use.
///
///     "cuda", "cuda:N"   a GPU
///     "sim"              the simulated device, which computes on the CPU
///     "auto"             the first GPU, or "sim" if there is none
///
/// For "sim", the library libsidestream_sim is loaded from the folder of this library. It registers itself as LibTorch's PrivateUse1
/// device, and Sidestream's autograd engine is installed with it. If "auto" chooses "sim", a LibTorch warning says why.
/// Threads: any.
/// Throws: UsageError for another name, for "cuda" in a build without the cuda backend, and if the simulator's library is missing. Also
/// UsageError for "sim" if another autograd engine is installed, such as Python's. DeviceError for "cuda" without a usable driver or
/// device, and for "auto" if there is a driver that does not work. Each message gives the remedy.
[[nodiscard]] SIDESTREAM_API c10::Device find_device(const std::string& name);

/// What `sidestream info` shows of a device.
struct DeviceSummary {
  std::string name;               ///< name of the device
  std::string driver;             ///< the driver with its versions, as text
  std::int64_t memory_bytes = 0;  ///< all device memory
};
/// Asks the driver about a device.  Threads: any.  Throws: UsageError for a device that find_device did not give; DeviceError.
[[nodiscard]] SIDESTREAM_API DeviceSummary describe(c10::Device device);

/// Use of device memory in bytes. Peaks are since the latest call of reset_memory_peaks.
struct MemoryUse {
  /// In use now: by tensors, by the work of captured graphs, and by copies under way. Memory that a graph's pool holds but does
  /// not use now is left out. Without graphs this equals `allocated`.
  std::int64_t live = 0;
  /// Peak of `live`. For steps that replay graphs it is the peak of one measured step: see Report::step_peak_bytes.
  std::int64_t live_peak = 0;
  /// What LibTorch's allocator counts: all tensors outside of graphs, and the outputs of graphs, whether they are in use or not.
  std::int64_t allocated = 0;
  std::int64_t allocated_peak = 0;  ///< peak of `allocated`
  std::int64_t reserved = 0;        ///< held by LibTorch's allocator, with free blocks and the pools of graphs
  std::int64_t reserved_peak = 0;   ///< peak of `reserved`
};
/// Reads the use of device memory.  Capture: legal.  Threads: any.
[[nodiscard]] SIDESTREAM_API MemoryUse memory_use(c10::Device device);
/// Restarts all peaks at the present values. LibTorch's own peak statistics restart too. An engine also restarts LibTorch's statistics
/// during the steps that it measures.  Threads: any.
SIDESTREAM_API void reset_memory_peaks(c10::Device device);
/// Returns cached, unused memory to the device.  Capture: illegal. If another thread captures, this waits for the end of the capture.
SIDESTREAM_API void release_cached_memory(c10::Device device);
/// Blocks until the device is idle.  Capture: illegal. If another thread captures, this waits for the end of the capture.
SIDESTREAM_API void synchronize(c10::Device device);

/// Measured bandwidth between pinned host memory and the device, in GB/s (1e9 bytes).
struct LinkSpeed {
  double to_host = 0;    ///< copies to the host alone
  double to_device = 0;  ///< copies to the device alone
  double both = 0;       ///< the sum of both directions at once
  double pinning = 0;    ///< how fast host memory is page-locked
};
/// Copies `bytes` bytes a few times in each direction and reports the best rates. Blocks the host.
/// Capture: illegal.  Throws: DeviceError without enough memory.
[[nodiscard]] SIDESTREAM_API LinkSpeed measure_link(c10::Device device, std::size_t bytes = std::size_t{64} << 20);

}  // namespace sidestream
