#pragma once
#include <string>

namespace sidestream::cuda {

/// Tells `host_waits` from here on of calls of CUDA's runtime and driver that make the host wait or ask for device memory, whoever
/// makes them. Once per process: later calls do nothing. Where CUPTI is missing or taken (by a profiler), what LibTorch tells of its own
/// synchronisations is told instead. Gives in words what is not heard, with the remedy; empty where all is.
[[nodiscard]] std::string hear_driver_calls();

/// True where LibTorch's own word is needed, as CUPTI's is not heard.
[[nodiscard]] bool asks_libtorch() noexcept;

}  // namespace sidestream::cuda
