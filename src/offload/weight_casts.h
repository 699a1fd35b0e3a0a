#pragma once
#include <ATen/core/Tensor.h>

namespace sidestream {

/// True for the copies that autocast makes of weights (bf16 copies of fp32 parameters) and for views of them: not parameter
/// storage, yet kept by autocast until its region ends, so that offloading them frees nothing. Known by how they were made: by
/// one differentiable operator from a leaf that requires grad, with another dtype and the leaf's sizes.
///
/// `saved` is what a pack hook of autograd's default hooks is given: the variable itself, with its grad_fn (LibTorch 2.11;
/// hooks registered later on one saved variable get `detach()`, where nothing can be known).
/// No operator runs and nothing is allocated. Threads: any.
[[nodiscard]] bool is_weight_cast(const at::Tensor& saved);

}  // namespace sidestream
