#pragma once
#include <cuda_runtime_api.h>

namespace sidestream::cuda {

/// Lets the calling thread make calls that the driver forbids while a stream captures (allocate, destroy), for its lifetime.
/// Not for calls whose effect a capture must see. Source: microsoft/mscclpp gpu_utils.cc.
class [[nodiscard]] RelaxedCapture {
 public:
  RelaxedCapture() noexcept { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace sidestream::cuda
