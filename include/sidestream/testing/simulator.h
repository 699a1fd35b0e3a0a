#pragma once
#include <cstddef>

#include <c10/core/Device.h>

#include "sidestream/detail/export.h"
#include "sidestream/testing/schedule.h"

namespace sidestream {

// How the simulated device behaves. All of these change the one simulated device of the process, at once and until they are
// called again. Threads: any. Throws: UsageError for another device than sim.

/// The order in which it runs queued work. Waits for what is queued. Capture: legal.
SIDESTREAM_API void set_schedule(c10::Device sim, const Schedule& schedule);

/// Device memory beyond `bytes` bytes is refused, as on a smaller device. The environment variable SIDESTREAM_SIM_MEMORY gives it
/// when the process first uses the device. A graph takes 512 bytes of it for each of its nodes, beside tensors. Capture: legal.
SIDESTREAM_API void set_memory_limit(c10::Device sim, std::size_t bytes);

/// Pinned host memory beyond `bytes` bytes is refused. Capture: legal.
SIDESTREAM_API void set_pinned_limit(c10::Device sim, std::size_t bytes);

/// A wait for an event that was never recorded waits for nothing, on a GPU too. Strict: it throws UsageError at the wait.
SIDESTREAM_API void set_strict_waits(c10::Device sim, bool strict);

}  // namespace sidestream
