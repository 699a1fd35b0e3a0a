#pragma once
#include <cstdio>
#include <exception>
#include <source_location>

#include <cuda_runtime_api.h>

namespace sidestream::cuda {

/// Throws the error for `status`: CaptureError if a rule of capture was broken, else DeviceError. The message names the status, the call,
/// the object and the source location. The driver's last error is cleared before. Threads: any.
[[noreturn]] void throw_status(cudaError_t status, const char* call, const char* object, std::source_location where);

/// Throws unless `status` is success; `call` is the driver's function, `object` what it was called for.
inline void check(cudaError_t status, const char* call, const char* object,
                  std::source_location where = std::source_location::current()) {
  if (status != cudaSuccess) [[unlikely]] {
    throw_status(status, call, object, where);
  }
}

/// For tear-down: one line on stderr unless `status` is success or says that the driver or its context is gone already
/// (the process ends). The driver's last error is cleared. Threads: any. Throws: never.
void report(cudaError_t status, const char* call, const char* object) noexcept;

/// For a clean-up that does every step even if one fails: what `step` throws becomes one line on stderr that names `what`.
template <typename Step>
void attempt(const char* what, Step step) noexcept {
  try {
    step();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sidestream: %s failed: %s\n", what, error.what());
  }
}

}  // namespace sidestream::cuda
