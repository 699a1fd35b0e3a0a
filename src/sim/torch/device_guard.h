#pragma once
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace sidestream::sim {

/// The only device of the backend.
inline constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;
inline c10::Device sim_device() noexcept { return c10::Device(kDeviceType, 0); }

/// The stream of that id as LibTorch passes it.
[[nodiscard]] inline c10::Stream as_stream(c10::StreamId stream) noexcept {
  return c10::Stream(c10::Stream::UNSAFE, sim_device(), stream);
}

/// Throws: UsageError if `device` has an index beyond the only device's.
void check_index(c10::Device device);

/// Makes the sim device guard LibTorch's guard for PrivateUse1. Called once, by register_sim_device.
void register_device_guard();

}  // namespace sidestream::sim
