#pragma once
#include <string>

#include <cuda_runtime_api.h>

#include "runtime/backend.h"

namespace sidestream::cuda {

/// Interprets the driver's answers. `status` and `devices`: of cudaGetDeviceCount; `driver_version`: of cudaDriverGetVersion, 0 if no
/// driver is installed. If there is no driver or no device, the device is `absent`. If the driver gives another error or is too old, it
/// is `broken`.
[[nodiscard]] Availability judge_driver(cudaError_t status, int devices, int driver_version);

/// "13.0" for 13000.
[[nodiscard]] std::string version_words(int version);

/// Asks the driver. Threads: any. Capture: legal.
[[nodiscard]] Availability ask_driver();

}  // namespace sidestream::cuda
