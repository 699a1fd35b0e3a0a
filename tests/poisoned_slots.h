#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include "runtime/forwarding_runtime.h"

namespace sidestream::testing_model {

/// Not a number in every floating type, and what the sim device poisons with.
inline constexpr int kPoisonByte = 0xff;

/// Overwrites host slots whenever nothing may read them: before a copy writes one, and after a copy has read it, in the order of
/// that copy's stream. Works inside captures, on both backends. For engines that read a slot once for each write: no retained
/// graphs. Threads: as Runtime.
class PoisonedSlots final : public ForwardingRuntime {
 public:
  explicit PoisonedSlots(std::shared_ptr<Runtime> inner)
      : ForwardingRuntime(std::move(inner)),
        poison_(at::full({kBlock}, kPoisonByte, at::TensorOptions().dtype(at::kByte).device(device()))) {
    synchronize_device();
  }

  void copy_to_host(void* pinned, const void* device, std::size_t bytes, c10::Stream stream) override {
    poison(pinned, bytes, stream);
    inner().copy_to_host(pinned, device, bytes, stream);
  }
  void copy_to_device(void* device, const void* pinned, std::size_t bytes, c10::Stream stream) override {
    inner().copy_to_device(device, pinned, bytes, stream);
    poison(const_cast<void*>(pinned), bytes, stream);
  }

  /// Slots overwritten so far, those captured counted once.
  [[nodiscard]] std::int64_t count() const noexcept { return count_.load(); }

 private:
  static constexpr std::int64_t kBlock = std::int64_t{1} << 20;

  // A copy like the engine's own: a fill of host memory would be compute to the checks of a captured graph.
  void poison(void* pinned, std::size_t bytes, c10::Stream stream) {
    auto* to = static_cast<std::byte*>(pinned);
    for (std::size_t done = 0; done < bytes; done += kBlock) {
      inner().copy_to_host(to + done, poison_.const_data_ptr(), std::min<std::size_t>(kBlock, bytes - done), stream);
    }
    count_.fetch_add(1);
  }

  at::Tensor poison_;
  std::atomic<std::int64_t> count_{0};
};

}  // namespace sidestream::testing_model
