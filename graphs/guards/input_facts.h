#pragma once
#include <cstddef>

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/ArrayRef.h>

namespace sidestream {

/// Which arguments of one call share memory: for each argument the index of an earlier argument that is the same tensor, or that lies in
/// the same storage. If there is no such argument, its own index.
struct InputAliases {
  std::size_t same_as = 0;
  std::size_t shares_with = 0;

  [[nodiscard]] static InputAliases of(c10::ArrayRef<at::Tensor> inputs, std::size_t index) noexcept;
  bool operator==(const InputAliases& other) const noexcept = default;
};

/// True for sparse and nested tensors.
[[nodiscard]] inline bool is_sparse_or_nested(const at::Tensor& tensor) noexcept {
  constexpr c10::DispatchKeySet keys(
      {c10::DispatchKey::Sparse, c10::DispatchKey::SparseCsr, c10::DispatchKey::NestedTensor});
  return tensor.defined() && tensor.key_set().has_any(keys);
}

/// True for a leaf that requires a gradient. Autocast keeps the cast of such a tensor and shares it among all its readers. The gradients
/// of several readers then meet before the cast's backward, not after it.
[[nodiscard]] bool has_shared_cast(const at::Tensor& tensor);

/// True if both have the same strides where they matter. Their sizes must be the same.
[[nodiscard]] bool same_strides(const at::Tensor& a, const at::Tensor& b);

/// The same, and neither is lazily conjugated or negated unlike the other.
[[nodiscard]] bool same_layout(const at::Tensor& a, const at::Tensor& b);

}  // namespace sidestream
