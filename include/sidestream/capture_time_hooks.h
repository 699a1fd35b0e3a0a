#pragma once
#include <functional>

#include <torch/arg.h>

namespace sidestream {

/// Functions that run around a callable's forward and backward while it is sized, warmed up and captured, but not at a replay
/// [capture_time_hooks]. For example, they gather weights, or switch a feature off.
///
/// Each pass calls all four, in the order of the members; for a callable without a backward it calls the first two. A capture calls the
/// forward hooks of all callables, then the backward hooks in reverse order.
/// If a hook relocates weights (`set_data`), the graphs read the weights at the new addresses. That memory is held as long as the
/// graphs live. The weights must be at the same addresses in forward and backward. The caller puts them there before each replay.
/// Ordering: the capture stream is current.  Capture: none is open, so a hook may synchronise and read values on the host.
/// Threads: the thread of make_graphed_callables, or of the call that captures again after weights were relocated.
/// Throws: an exception from a hook ends that call, and nothing of the capture is left.  Source: TransformerEngine.
struct CaptureTimeHooks {
  TORCH_ARG(std::function<void()>, before_forward);   ///< before the forward
  TORCH_ARG(std::function<void()>, after_forward);    ///< after the forward, unless it throws
  TORCH_ARG(std::function<void()>, before_backward);  ///< before the whole backward of the callable
  TORCH_ARG(std::function<void()>, after_backward);   ///< after the backward, unless it throws
};

}  // namespace sidestream
