#pragma once
#include <ATen/core/Tensor.h>

namespace sidestream {

/// A tensor over the same memory that keeps nothing alive: the address is the graph's, its pool keeps it.
[[nodiscard]] at::Tensor not_owning(const at::Tensor& tensor);

}  // namespace sidestream
