#pragma once
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "sidestream/call_arguments.h"

namespace sidestream {

// Gradient hooks that a callable's body registers. Those on tensors that it makes are captured, as its operators are. What they
// do beside computing happens at the capture and at no replay.

/// True where the autograd graph of `outputs` has such hooks.
[[nodiscard]] bool has_hooks_of_body(const detail::TensorBuffer& outputs);

/// A hook on an input or a parameter gets, in plain training, what code outside of the call adds to the gradient as well; and
/// retain_grad gives a tensor a `.grad` that no replay writes.
/// `arguments`: as the body got them.
/// Throws: CaptureError for both.
void refuse_hooks_of_body(const std::string& name, const std::vector<at::Tensor>& arguments,
                          const detail::TensorBuffer& outputs);

}  // namespace sidestream
