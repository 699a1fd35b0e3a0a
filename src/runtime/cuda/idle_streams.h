#pragma once
#include <mutex>
#include <vector>

#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

namespace sidestream::cuda {

/// Streams of one device that have no owner now. They are handed on and never destroyed. LibTorch's caching allocator refers to a stream
/// as long as it has memory of that stream. If it unmaps such memory (expandable segments), it waits for the stream, long after the
/// stream's owner is gone. One for each device, for the life of the process. Threads: any.
class IdleStreams {
 public:
  [[nodiscard]] static IdleStreams& of(c10::Device device);

  /// One that was given back, else a new one of the current device. Throws: DeviceError.
  [[nodiscard]] cudaStream_t take();
  void give_back(cudaStream_t stream) noexcept;

 private:
  std::mutex mutex_;
  std::vector<cudaStream_t> streams_;
};

}  // namespace sidestream::cuda
