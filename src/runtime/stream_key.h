#pragma once
#include <cstdint>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "sidestream/detail/export.h"

namespace sidestream {

/// The same number for the same stream, whoever names it: LibTorch may have several ids for one stream of the driver.
using StreamKey = std::int64_t;
[[nodiscard]] SIDESTREAM_API StreamKey key_of(c10::Stream stream);
/// By the driver's handle; `native` is null for the default stream of `device`.
[[nodiscard]] SIDESTREAM_API StreamKey key_of(const void* native, c10::DeviceIndex device) noexcept;

}  // namespace sidestream
