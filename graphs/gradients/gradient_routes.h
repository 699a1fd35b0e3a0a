#pragma once
#include <vector>

#include <ATen/core/Tensor.h>

#include "graphs/outputs/output_set.h"

namespace sidestream {

/// For each leaf of `targets`: from which of `outputs` a way of autograd's graph leads to it. Where a step uses none of them,
/// plain training gives the leaf no gradient at all. Outputs without history lead nowhere.
[[nodiscard]] std::vector<OutputSet> gradient_routes(const std::vector<at::Tensor>& outputs,
                                                     const std::vector<at::Tensor>& targets);

/// The leaf whose gradient autograd finds through `leaf`: itself, but for what a saved-tensor hook has unpacked in its place, as a
/// backward inside of a body reads it.
[[nodiscard]] at::Tensor leaf_itself(const at::Tensor& leaf);

}  // namespace sidestream
