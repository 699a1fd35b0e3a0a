#pragma once
#include <cstddef>

#include "runtime/runtime.h"
#include "sidestream/device.h"

namespace sidestream {

/// Bandwidth between pinned host memory and the device of `runtime`: the best of a few copies of `bytes` bytes each way alone,
/// and of both at once.
/// Ordering: blocks the host. Capture: illegal while the calling thread captures. Throws: DeviceError without enough memory.
[[nodiscard]] LinkSpeed link_speed(Runtime& runtime, std::size_t bytes);

}  // namespace sidestream
