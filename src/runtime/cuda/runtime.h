#pragma once
#include <memory>

#include <c10/core/Device.h>

#include "runtime/runtime.h"

namespace sidestream {

/// The runtime of CUDA device `device` (index 0 when it has none).
/// Throws: DeviceError without a usable driver or device (says which driver is needed, and that the sim device works);
/// UsageError where the backend was not built in.
[[nodiscard]] std::shared_ptr<Runtime> make_cuda_runtime(c10::Device device);

/// Tells from here on what LibTorch itself asks of CUDA devices to ForeignOrder listeners. Once per process: later calls do
/// nothing. Where another tracer has LibTorch's seam already (Python's sanitizer), says so on stderr and hears less.
void hear_libtorch_on_cuda();

}  // namespace sidestream
