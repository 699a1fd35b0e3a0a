#pragma once
#include <string>

namespace sidestream::cuda {

/// Tells `host_waits` from here on of calls of CUDA's runtime and driver that make the host wait or ask for memory, whoever makes them,
/// until `leave_driver_calls` was called as often. CUPTI serves one listener a process: it is taken by the first call and given
/// back by the last. Where it is missing, or a profiler has it, what LibTorch tells of its own synchronisations is told instead. Gives in
/// words what is not heard, with the remedy; empty where all is. Threads: any.
[[nodiscard]] std::string hear_driver_calls();
void leave_driver_calls() noexcept;

/// True where LibTorch's own word is needed, as CUPTI's is not heard.
[[nodiscard]] bool asks_libtorch() noexcept;

}  // namespace sidestream::cuda
