#pragma once
#include <vector>

#include <ATen/core/Tensor.h>

namespace sidestream {

/// Whether `tensor` itself is one of `tensors`.
[[nodiscard]] bool holds(const std::vector<at::Tensor>& tensors, const at::Tensor& tensor);

/// Those of `tensors` that require a gradient, each once.
[[nodiscard]] std::vector<at::Tensor> requiring(const std::vector<at::Tensor>& tensors);

}  // namespace sidestream
