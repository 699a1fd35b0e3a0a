#pragma once
#include <cstdlib>

#include <c10/core/Device.h>

namespace sidestream::testing_model {

/// The GPU that tests use: cuda:0, or the one whose index SIDESTREAM_TEST_GPU gives. Another one than 0 is never made current, so
/// that the same tests show engines on a device that is not.
inline c10::Device tested_gpu() {
  const char* const index = std::getenv("SIDESTREAM_TEST_GPU");
  return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index == nullptr ? 0 : std::atoi(index))};
}

/// Whether the host waits for each kernel (CUDA_LAUNCH_BLOCKING=1): nothing is late then, and what only late work shows cannot be
/// shown.
inline bool launches_block() {
  const char* const blocking = std::getenv("CUDA_LAUNCH_BLOCKING");
  return blocking != nullptr && std::atoi(blocking) != 0;
}

}  // namespace sidestream::testing_model
