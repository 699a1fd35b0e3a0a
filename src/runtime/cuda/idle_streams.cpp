#include "runtime/cuda/idle_streams.h"

#include "runtime/cuda/error.h"
#include "runtime/each_device.h"

namespace sidestream::cuda {

IdleStreams& IdleStreams::of(c10::Device device) {
  return of_device<IdleStreams>(device, [] { return new IdleStreams(); });
}

cudaStream_t IdleStreams::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!streams_.empty()) {
      cudaStream_t stream = streams_.back();
      streams_.pop_back();
      return stream;
    }
  }
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags", "stream");
  const std::lock_guard lock(mutex_);
  streams_.reserve(streams_.capacity() + 1);  // so that giving back cannot fail
  return stream;
}

void IdleStreams::give_back(cudaStream_t stream) noexcept {
  const std::lock_guard lock(mutex_);
  streams_.push_back(stream);
}

}  // namespace sidestream::cuda
