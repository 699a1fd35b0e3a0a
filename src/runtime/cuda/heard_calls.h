#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include <cuda.h>
#include <cupti_callbacks.h>

#include "runtime/host_waits.h"

namespace sidestream::cuda {

/// A call of CUDA's runtime or driver as CUPTI numbers it.
struct DriverCall {
  CUpti_CallbackDomain domain;
  CUpti_CallbackId id;
};

/// All that may make the host wait, or ask the driver for memory. A copy between devices, a memset of device memory and a free in a
/// stream's order do neither.
[[nodiscard]] std::vector<DriverCall> heard_calls();

/// Memory that a copy has at one of its ends.
enum class CopyEnd : std::uint8_t { device, pinned, pageable, managed };
/// Says what lies at an address.
using EndOf = CopyEnd (*)(const void* address) noexcept;

/// What `call`, with its parameters as CUPTI gives them, does to the host; not set if the host goes on. `end_of` is called only if the
/// parameters leave the answer open.
[[nodiscard]] std::optional<HostWait> wait_of(DriverCall call, const void* parameters, EndOf end_of) noexcept;

/// For CUPTI's callback: tells `host_waits` of a call that begins, unless it is a part of another one: the runtime calls the driver.
/// `subscription` is another number for each subscription: the end of a call may come after the end of the one that heard it begin.
void hear_call(std::uintptr_t subscription, DriverCall call, const CUpti_CallbackData& data, EndOf end_of) noexcept;

}  // namespace sidestream::cuda
