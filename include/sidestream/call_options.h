#pragma once
#include <cstdint>

#include <torch/arg.h>

namespace sidestream {

/// A forward comes while the backward of an earlier one is pending: another capture (microbatches in flight), or a UsageError.
enum class OnPending : std::uint8_t { capture, error };
/// A call's arguments fit none of its captures: another capture, an eager run, or a UsageError.
enum class OnNewArguments : std::uint8_t { capture, eager, error };

/// What `ss::call` does where a graphed call cannot replay what was captured. Callables of make_graphed_callables have one
/// capture each: with them it is always a UsageError.
struct CallOptions {
  /// A forward whose earlier backward is pending.
  TORCH_ARG(OnPending, on_pending) = OnPending::capture;
  /// New values of arguments that are not tensors, new shapes, dtypes or requires_grad, another state of autocast.
  TORCH_ARG(OnNewArguments, on_new_arguments) = OnNewArguments::capture;
  /// Captures of one call (microbatches in flight times argument variants); at least 1. What fits none of them and would be one
  /// more runs eagerly, and a warning says so once.
  TORCH_ARG(int64_t, max_captures) = 8;
};

}  // namespace sidestream
