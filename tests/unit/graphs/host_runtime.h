#pragma once
#include <cstring>

#include "unit/memory/fake_runtime.h"

namespace sidestream::testing_model {

/// A device that is the host: LibTorch's CPU tensors, one queue that does everything at once. Beside it nothing is taken from
/// the heap, so that what a step takes is the engine's and LibTorch's.
class HostRuntime final : public test::FakeRuntime {
 public:
  void record(const Event& /*event*/, c10::Stream /*stream*/) override {}
  void wait(c10::Stream /*stream*/, const Event& /*event*/) override {}
  void copy_to_host(void* pinned, const void* device, std::size_t bytes, c10::Stream /*stream*/) override {
    std::memcpy(pinned, device, bytes);
  }
  void copy_to_device(void* device, const void* pinned, std::size_t bytes, c10::Stream /*stream*/) override {
    std::memcpy(device, pinned, bytes);
  }
};

}  // namespace sidestream::testing_model
