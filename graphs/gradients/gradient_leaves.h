#pragma once
#include <vector>

#include <ATen/core/Tensor.h>

#include "graphs/outputs/static_tensors.h"

namespace sidestream {

/// True if `tensor` itself is one of `tensors`.
[[nodiscard]] bool holds(const std::vector<at::Tensor>& tensors, const at::Tensor& tensor);

/// True if `output` requires a gradient that is its own. A view that was made without gradients has its base's flag, and none of its own.
[[nodiscard]] bool backward_may_begin_from(const at::Tensor& output);

/// Those of `tensors` that require a gradient, each once.
[[nodiscard]] std::vector<at::Tensor> requiring(const std::vector<at::Tensor>& tensors);

/// For each leaf of `targets`, the `outputs` from which autograd's graph leads to it. If a step uses none of them, plain training gives
/// the leaf no gradient at all. Outputs without history lead nowhere.
[[nodiscard]] std::vector<OutputSet> gradient_routes(const std::vector<at::Tensor>& outputs,
                                                     const std::vector<at::Tensor>& targets);

/// The leaf whose gradient autograd finds through `leaf`: nearly always `leaf`. A saved-tensor hook may have unpacked another tensor in
/// its place, which a backward inside of a body reads.
[[nodiscard]] at::Tensor leaf_itself(const at::Tensor& leaf);

}  // namespace sidestream
