#pragma once
#include <vector>

#include <ATen/core/Tensor.h>

#include "sidestream/detail/export.h"

namespace sidestream {

/// Scales the gradients of `parameters` in place so that their total norm is at most `max_norm`. Returns the total norm before the scaling.
///
/// Parameters without a gradient are left out. The result is a tensor without dimensions on the device of the gradients. It may be infinite
/// or nan: this function reads no value on the host, so it cannot check. The arithmetic is that of torch::nn::utils::clip_grad_norm_, which
/// reads its result on the host and so cannot be captured.
/// Ordering: work on the current stream; the host does not wait.  Capture: legal.
/// Throws: UsageError for gradients on several devices, for sparse gradients, for a `max_norm` that is negative or nan, and for a
/// `norm_type` that is nan.
SIDESTREAM_API at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                                          double norm_type = 2.0);

}  // namespace sidestream
