#pragma once
#include <vector>

#include <ATen/core/Tensor.h>

#include "sidestream/detail/export.h"

namespace sidestream {

/// Scales the gradients of `parameters` in place so that their total norm is at most `max_norm`; those without a gradient are
/// left out. Gives the total norm before, a tensor of no dimensions on their device. It may be infinity or nan: no value is looked at.
/// The arithmetic is torch::nn::utils::clip_grad_norm_'s, which reads its result on the host and so cannot be captured.
/// Ordering: work on the current stream, without a wait of the host.  Capture: legal.
/// Throws: UsageError for gradients on several devices, sparse ones, a `max_norm` that is negative or nan, and a `norm_type` that
///         is nan.
SIDESTREAM_API at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                                          double norm_type = 2.0);

}  // namespace sidestream
