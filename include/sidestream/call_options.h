#pragma once
#include <cstdint>

#include <torch/arg.h>

namespace sidestream {

/// What a call does if the backward of its earlier forward is still pending. If that backward belongs to another capture in the same memory
/// (CallOptions::share_memory), the call runs eagerly with `capture` too.
enum class OnPending : std::uint8_t {
  /// Uses another capture, one for each microbatch in flight. If it does not exist yet, the call runs eagerly in this step.
  capture,
  error,  ///< throws UsageError
  eager,  ///< runs the call eagerly
};
/// What a call does if its arguments fit none of its captures.
enum class OnNewArguments : std::uint8_t {
  capture,  ///< runs eagerly now and is captured before the next step
  eager,    ///< runs eagerly
  error,    ///< throws UsageError
};
/// What a call under no_grad does, whether its module is in training or in eval mode.
enum class OnEvaluation : std::uint8_t {
  eager,    ///< runs eagerly
  capture,  ///< replays a graph of the forward alone, which uses the memory of the first training capture
};
/// What a call does if it needs more captures than CallOptions::max_captures.
enum class OnMaxCaptures : std::uint8_t {
  eager,            ///< runs eagerly, with one warning
  drop_least_used,  ///< the least recently used of its captures is dropped when the next step begins
  error,            ///< throws UsageError
};

/// What `ss::call` does if a graphed call cannot replay what was captured. Of these options only `max_captures` is for
/// callables too (GraphOptions::order). GraphedCallable says when a callable throws UsageError, and when it runs eagerly.
///
/// Each option is a chained setter; without an argument it gives the value.
struct CallOptions {
  /// For a forward while the backward of an earlier forward is pending.
  TORCH_ARG(OnPending, on_pending) = OnPending::capture;
  /// For a call that fits none of its captures: new values of arguments that are not tensors, new shapes, strides, dtypes or requires_grad,
  /// another state of autocast or of a global switch, other training flags or module options, frozen, unfrozen or replaced parameters.
  TORCH_ARG(OnNewArguments, on_new_arguments) = OnNewArguments::capture;
  /// Upper bound on the captures of one call (microbatches in flight times variants of arguments), at least 1. In a step with an order, a
  /// call has a capture for each microbatch, if the bound allows that many. Captures of the forward alone are
  /// counted separately. `on_max_captures` says what happens to a call that would need one more.
  TORCH_ARG(int64_t, max_captures) = 8;
  /// For a call that would need one capture more.
  TORCH_ARG(OnMaxCaptures, on_max_captures) = OnMaxCaptures::eager;
  /// Lets the captures of a call for different shapes, values and modes share device memory (see GraphPool). Together they reserve what
  /// the largest of them needs. Captures for several microbatches in flight do not share.
  /// While a backward of one capture is pending, a call that fits another capture runs eagerly, or as `on_pending` says. If a further
  /// capture for microbatches in flight is free, the call replays that one.
  /// If `on_new_arguments` is `eager`, the first call with new arguments that runs eagerly gives a warning.
  TORCH_ARG(bool, share_memory) = false;
  /// For a call under no_grad.
  TORCH_ARG(OnEvaluation, on_evaluation) = OnEvaluation::eager;
};

}  // namespace sidestream
