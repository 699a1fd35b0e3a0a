#pragma once
#include <functional>

#include <torch/arg.h>

namespace sidestream {

/// What a callable has run around its forward and its backward while it is sized, warmed up and captured, and at no replay: to gather
/// weights, to switch something off [capture_time_hooks]. Each pass calls all four, in the order of the members; a callable
/// that has no backward is called with the first two. A capture calls the forward ones of all callables, then the backward ones
/// in reverse.
/// Weights that a hook puts elsewhere (`set_data`) are read there by the graphs, and that memory is held as long as they live: forward
/// and backward must find them at one place, and so must each replay, before which the caller puts them there.
/// Ordering: the capture stream is current.  Capture: none is open, so a hook may synchronise and read values on the host.
/// Threads: that of make_graphed_callables, or of the call that captures again where weights were relocated.
/// Throws: what a hook throws comes out of that call, and nothing is left of the capture. Source: TransformerEngine.
struct CaptureTimeHooks {
  TORCH_ARG(std::function<void()>, before_forward);
  TORCH_ARG(std::function<void()>, after_forward);    ///< not where the forward throws
  TORCH_ARG(std::function<void()>, before_backward);  ///< before the whole backward of the callable
  TORCH_ARG(std::function<void()>, after_backward);   ///< not where the backward throws
};

}  // namespace sidestream
