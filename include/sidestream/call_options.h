#pragma once
#include <cstdint>

#include <torch/arg.h>

namespace sidestream {

/// A forward comes while the backward of an earlier one is pending: another capture (microbatches in flight), a UsageError, or an
/// eager run. Where captures share memory there is no other one: the call runs eagerly, or is a UsageError.
enum class OnPending : std::uint8_t { capture, error, eager };
/// A call's arguments fit none of its captures: another capture, an eager run, or a UsageError.
enum class OnNewArguments : std::uint8_t { capture, eager, error };
/// A call under no_grad (with modules in whatever mode): an eager run, or a graph of the forward alone, which keeps nothing for a
/// backward and lies in the memory of the first training capture.
enum class OnEvaluation : std::uint8_t { eager, capture };
/// A call needs more captures than `max_captures`: an eager run with one warning, that one of its captures that was used least recently
/// makes room when the next step begins, or a UsageError.
enum class OnMaxCaptures : std::uint8_t { eager, drop_least_used, error };

/// What `ss::call` does where a graphed call cannot replay what was captured. Callables of make_graphed_callables have one
/// capture each: with them it is always a UsageError.
struct CallOptions {
  /// A forward whose earlier backward is pending.
  TORCH_ARG(OnPending, on_pending) = OnPending::capture;
  /// New values of arguments that are not tensors, new shapes, dtypes or requires_grad, another state of autocast.
  TORCH_ARG(OnNewArguments, on_new_arguments) = OnNewArguments::capture;
  /// Captures of one call (microbatches in flight times argument variants), those of forwards alone counted apart; at least 1. What
  /// fits none of them and would be one more is done as `on_max_captures` says.
  TORCH_ARG(int64_t, max_captures) = 8;
  /// What becomes of a call that would need one more.
  TORCH_ARG(OnMaxCaptures, on_max_captures) = OnMaxCaptures::eager;
  /// Captures of other shapes, values and modes (not of other microbatches in flight) share device memory, see GraphPool: they
  /// reserve what the largest needs. While a backward of one is pending, a call that fits another runs eagerly, or as `on_pending`
  /// says, unless a further capture of it (for microbatches in flight) is free. A new shape that `on_new_arguments` runs eagerly is warned of once.
  TORCH_ARG(bool, share_memory) = false;
  /// A call under no_grad.
  TORCH_ARG(OnEvaluation, on_evaluation) = OnEvaluation::eager;
};

}  // namespace sidestream
