#pragma once
#include <ATen/core/Tensor.h>

namespace sidestream {

/// True for the copies that autocast makes of weights (bf16 copies of fp32 parameters), and for views of them. Such a copy is not the
/// parameter's storage, but autocast holds it until its region ends, so offloading it frees nothing. It is recognised by how it was made:
/// by one differentiable operator from a leaf that requires grad, with another dtype and the leaf's sizes.
///
/// `saved` is what a pack hook of autograd's default hooks is given: the variable itself, with its grad_fn (LibTorch 2.11). Hooks
/// registered later on one saved variable get `detach()`, which says nothing about its origin.
/// No operator runs and nothing is allocated. Threads: any.
[[nodiscard]] bool is_weight_cast(const at::Tensor& saved);

}  // namespace sidestream
