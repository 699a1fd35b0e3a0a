#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include "sim/device/device.h"

namespace sidestream::sim {

[[nodiscard]] inline bool is_sim(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

/// A tensor with one of these keys stands for the conjugate or the negative of the values in its memory.
inline constexpr c10::DispatchKeySet kLazyBits{c10::DispatchKey::Conjugate, c10::DispatchKey::Negative};
/// Those of `tensor`.
[[nodiscard]] c10::DispatchKeySet lazy_bits(const at::Tensor& tensor);

/// The bytes from the first to the last element of a strided tensor.
[[nodiscard]] Access extent(const at::Tensor& tensor, bool write);

/// CPU tensors on the bytes of the tensors of one operator call. They own no device memory, so what holds them (a recorded
/// work) does not keep blocks alive. Tensors that share a storage share one here too.
class Aliases {
 public:
  /// A CPU tensor of the same sizes, strides, dtype and lazy bits on the same bytes.
  [[nodiscard]] at::Tensor of(const at::Tensor& tensor);
  /// The result of a CPU kernel as a sim tensor: on the storage of an argument if the kernel returned one, else with the
  /// kernel's own block. An undefined tensor stays so. `name` and `kept` are for the error: a kept work must not return
  /// memory from elsewhere.
  [[nodiscard]] at::Tensor adopt(const at::Tensor& result, const char* name, bool kept);
  /// Gives `tensor` the sizes, strides and, if it had to grow, the block that the kernel gave to `alias`.
  /// The grown block's address, or null.
  void* take_over_resize(const at::Tensor& tensor, const at::Tensor& alias);

 private:
  struct Pair {
    c10::StorageImpl* device;
    c10::Storage cpu;
    void* address;
  };
  c10::SmallVector<Pair, 8> pairs_;
};

}  // namespace sidestream::sim
