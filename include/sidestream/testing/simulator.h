#pragma once
#include <cstddef>

#include <c10/core/Device.h>

#include "sidestream/detail/export.h"
#include "sidestream/testing/schedule.h"

namespace sidestream {

// A process has one simulated device. These functions change it immediately, and until they are called again.

/// Sets the order in which the simulated device runs queued work. Waits for the work that is queued.
/// Capture: legal.  Threads: any.  Throws: UsageError for another device than sim.
SIDESTREAM_API void set_schedule(c10::Device sim, const Schedule& schedule);

/// Limits device memory to `bytes` bytes, as on a smaller device. When the process first uses the device, the environment variable
/// SIDESTREAM_SIM_MEMORY sets the limit. Besides tensors, a graph takes 512 bytes for each of its nodes.
/// Capture: legal.  Threads: any.  Throws: UsageError for another device than sim.
SIDESTREAM_API void set_memory_limit(c10::Device sim, std::size_t bytes);

/// Limits pinned host memory to `bytes` bytes.
/// Capture: legal.  Threads: any.  Throws: UsageError for another device than sim.
SIDESTREAM_API void set_pinned_limit(c10::Device sim, std::size_t bytes);

/// Makes a wait for an event that was never recorded throw UsageError. If not strict, such a wait does nothing, as on a GPU.
/// Threads: any.  Throws: UsageError for another device than sim.
SIDESTREAM_API void set_strict_waits(c10::Device sim, bool strict);

}  // namespace sidestream
