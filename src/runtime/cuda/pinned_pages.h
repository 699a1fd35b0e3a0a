#pragma once
#include <cstddef>

#include <cuda_runtime_api.h>

namespace sidestream::cuda {

/// Page-locked host memory that every GPU reads and writes, from the start of a page on.
///
/// Large blocks are pages that several threads touch and the driver then locks (map_pages): the driver's own allocation, which
/// serves small blocks and wherever locking is refused, makes them one by one on one thread.
/// In a system of several NUMA nodes, the memory lies near the calling thread's current device, if the system allows.
/// Legal while another thread captures, in any error mode. Threads: any.
/// Throws: DeviceError that says how much was asked for.
[[nodiscard]] std::byte* pin(std::size_t bytes);
/// What `pin` gave, once no copy is on its way.
cudaError_t unpin(void* data) noexcept;

}  // namespace sidestream::cuda
