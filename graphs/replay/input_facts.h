#pragma once
#include <cstddef>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace sidestream {

/// How the arguments of one call stand to each other: an earlier argument that is the same tensor, or that lies in the same
/// storage; the argument's own index where there is none.
struct InputAliases {
  std::size_t same_as = 0;
  std::size_t shares_with = 0;

  [[nodiscard]] static InputAliases of(c10::ArrayRef<at::Tensor> inputs, std::size_t index) noexcept;
  bool operator==(const InputAliases& other) const noexcept = default;
};

/// True for a tensor whose cast autocast keeps and shares among all its readers: a leaf that requires a gradient. The gradients
/// of several readers then meet before the cast's backward, not behind it.
[[nodiscard]] bool has_shared_cast(const at::Tensor& tensor);

/// True when both have the same strides where they matter, and neither is lazily conjugated or negated unlike the other.
[[nodiscard]] bool same_layout(const at::Tensor& a, const at::Tensor& b);

}  // namespace sidestream
