#include "runtime/cuda/error.h"

#include <cstdio>
#include <string>
#include <string_view>

#include "sidestream/error.h"

namespace sidestream::cuda {
namespace {

std::string_view file_name(std::string_view path) {
  const auto slash = path.rfind('/');
  return slash == std::string_view::npos ? path : path.substr(slash + 1);
}

const char* remedy(cudaError_t status) {
  if (status == cudaErrorStreamCaptureInvalidated) {
    return "; do not synchronize the device while a graph is captured, from any thread (cudaDeviceSynchronize, "
           "torch::cuda::synchronize); sidestream::synchronize waits for the capture's end";
  }
  if (status == cudaErrorStreamCaptureUnjoined) {
    return "; join every stream that was forked into the capture before it ends";
  }
  if (status == cudaErrorStreamCaptureIsolation) {
    return "; wait only for events recorded in the same capture, or for external events";
  }
  if (status == cudaErrorStreamCaptureUnsupported) {
    return "; do not synchronize, query or read values on the host while a stream captures";
  }
  if (status == cudaErrorStreamCaptureImplicit) {
    return "; keep work off the default stream while a stream captures";
  }
  if (status == cudaErrorStreamCaptureWrongThread) {
    return "; end a capture on the thread that began it";
  }
  if (status == cudaErrorCapturedEvent) {
    return "; an event recorded inside a capture cannot be used outside of it, use an external event";
  }
  return "";
}

/// True for the statuses with which the driver says that a rule of stream capture was broken.
bool is_capture_error(cudaError_t status) noexcept {
  return status >= cudaErrorStreamCaptureUnsupported && status <= cudaErrorStreamCaptureWrongThread;
}

}  // namespace

void throw_status(cudaError_t status, const char* call, const char* object, std::source_location where) {
  (void)cudaGetLastError();
  std::string message(call);
  message.append(" (").append(object).append(") failed: ").append(cudaGetErrorString(status));
  message.append(" (").append(cudaGetErrorName(status)).append(", ").append(std::to_string(status)).append(")");
  message.append(" at ").append(file_name(where.file_name())).append(":").append(std::to_string(where.line()));
  message.append(remedy(status));
  if (is_capture_error(status)) {
    throw CaptureError(message);
  }
  throw DeviceError(message, status);
}

void report(cudaError_t status, const char* call, const char* object) noexcept {
  if (status == cudaSuccess) {
    return;
  }
  if (status != cudaErrorCudartUnloading && status != cudaErrorContextIsDestroyed) {
    std::fprintf(stderr, "sidestream: %s (%s) failed while it was destroyed: %s (%d)\n", call, object,
                 cudaGetErrorName(status), static_cast<int>(status));
    (void)cudaGetLastError();
  }
}

}  // namespace sidestream::cuda
