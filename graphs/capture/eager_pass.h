#pragma once
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "graphs/capture/pass_clock.h"
#include "graphs/capture/pass_hooks.h"
#include "graphs/sequence/captured_call.h"

namespace sidestream {

/// Runs the body of `spec` once in the state of the call, forward and backward with ones as the gradients of its outputs, and
/// returns these. `wanted` gives the leaves whose gradients are asked for: it is asked before the forward, and again behind it,
/// which may have found more. `used`, if any, gets for each of the latter whether it has a gradient. `clock`, if any, times it,
/// without the hooks.
/// `.grad` stays as it is.
/// Throws: CaptureError (a backward that adds into `.grad` itself, hooks on what the body was given), and what the body throws.
[[nodiscard]] detail::TensorBuffer eager_pass(const CallSpec& spec, const std::vector<at::Tensor>& inputs,
                                              const std::function<std::vector<at::Tensor>()>& wanted,
                                              const PassHooks& hooks, std::vector<bool>* used,
                                              PassClock* clock = nullptr);

}  // namespace sidestream
