#pragma once
#include <functional>
#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

namespace sidestream {

/// Keys of tensors that stand for another tensor, or for one that is not written out. They are neither plain nor composites.
inline constexpr c10::DispatchKeySet wrapped_keys({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                                                   c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchBatched,
                                                   c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::ZeroTensor,
                                                   c10::DispatchKey::Named});

/// The plain strided tensors that a sparse, nested or quantised tensor consists of.
///
/// Sparse (COO): indices, values. Sparse (CSR, CSC, BSR, BSC): compressed indices, plain indices, values. Nested (strided): the bytes of
/// its storage. Quantised: the bytes of its storage, and if it is quantised per channel, scales and zero points.
struct Composite {
  c10::SmallVector<at::Tensor, 3> parts;
  /// Makes the tensor from tensors like `parts`: same dtype, layout, sizes, coalesced flag and quantiser. A leaf without gradient.
  std::function<at::Tensor(c10::ArrayRef<at::Tensor> parts)> rebuild;
};

/// True for sparse, nested and quantised tensors, also for those that `split` does not split.
[[nodiscard]] inline bool is_composite(const at::Tensor& tensor) noexcept {
  constexpr c10::DispatchKeySet keys({c10::DispatchKey::Sparse, c10::DispatchKey::SparseCsr,
                                      c10::DispatchKey::Quantized, c10::DispatchKey::NestedTensor});
  return tensor.defined() && tensor.key_set().has_any(keys);
}

/// The parts of `tensor`, which share its memory. A part that is all of the tensor's own storage shares its version counter too. `tensor`
/// is not changed. Not set for plain tensors, for symbolic ones, for tensor subclasses, and for other quantisers.
/// Runs no operator. Threads: any.
[[nodiscard]] std::optional<Composite> split(const at::Tensor& tensor);

/// Calls `each` with each part of `tensor`; with `tensor` if `split` does not split it. Allocates nothing for plain tensors.
template <class Each>
void for_each_part(const at::Tensor& tensor, const Each& each) {
  if (is_composite(tensor)) {
    if (const std::optional<Composite> composite = split(tensor)) {
      for (const at::Tensor& part : composite->parts) {
        each(part);
      }
      return;
    }
  }
  each(tensor);
}

}  // namespace sidestream
