#pragma once
#include <string>

#include <cuda_runtime_api.h>

#include "runtime/backend.h"

namespace sidestream::cuda {

/// What the driver's answers say. `status` and `devices`: of cudaGetDeviceCount; `driver_version`: of cudaDriverGetVersion, 0
/// where no driver is installed. No driver and no device are `absent`; a driver that answers with anything else, or that is too
/// old, is `broken`.
[[nodiscard]] Availability judge_driver(cudaError_t status, int devices, int driver_version);

/// "13.0" for 13000.
[[nodiscard]] std::string version_words(int version);

/// Asks the driver. Threads: any. Capture: legal.
[[nodiscard]] Availability ask_driver();

}  // namespace sidestream::cuda
