#pragma once
#include <string>

namespace sidestream::cuda {

/// From here on, tells `host_waits` of calls of CUDA's runtime and driver that make the host wait or ask for memory, whichever code
/// calls. It ends when `leave_driver_calls` was called as often. CUPTI serves one listener a process: the first call takes it and the
/// last one releases it. If CUPTI is missing, or a profiler uses it, only the synchronisations that LibTorch reports are told. Returns in
/// words what is not heard, with the remedy; empty if everything is heard. Threads: any.
[[nodiscard]] std::string hear_driver_calls();
void leave_driver_calls() noexcept;

/// True if LibTorch's own word is needed, as CUPTI's is not heard.
[[nodiscard]] bool asks_libtorch() noexcept;

}  // namespace sidestream::cuda
