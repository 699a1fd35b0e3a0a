#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include <c10/core/Stream.h>
#include <torch/arg.h>

namespace sidestream {

class GraphEvent;

/// What to do where a graphed call cannot replay what it captured.
enum class OnChange : std::uint8_t { capture, eager, error };

/// How forward and backward are captured and replayed. In brackets: the reference systems' word.
struct GraphOptions {
  /// Eager passes before the capture, on the capture stream, offload off [num_warmup_iters]. The sizing pass runs even at 0.
  TORCH_ARG(int64_t, num_warmup_iters) = 3;
  /// Called once before all warm-up passes, on the capture stream [pre_warmup_hook].
  TORCH_ARG(std::function<void()>, pre_warmup_hook);
  /// Called once after all warm-up passes, on the capture stream [post_warmup_hook].
  TORCH_ARG(std::function<void()>, post_warmup_hook);
  /// An input that requires a gradient may get none [allow_unused_input].
  TORCH_ARG(bool, allow_unused_input) = false;
  /// Keeps saved activations through a backward, so that it can run twice; costs memory [retain_graph_in_backward].
  TORCH_ARG(bool, retain_graph_in_backward) = false;
  /// The backward graph adds into `.grad` itself, the fast way. It then owns those buffers: `.grad` set to none is zeroed and
  /// attached again at the next replay, another tensor in its place is a UsageError.
  TORCH_ARG(bool, accumulate_in_graph) = false;
  /// Side streams that consecutive forward graphs rotate over (K); at least 1.
  TORCH_ARG(int64_t, side_streams) = 2;
  /// The caller's stream to replay on in place of side streams [cuda_graph_stream].
  TORCH_ARG(std::optional<c10::Stream>, cuda_graph_stream);
  /// The caller's event, recorded inside each graph when its compute is done; needs `cuda_graph_stream` [cuda_graph_event].
  TORCH_ARG(std::shared_ptr<GraphEvent>, cuda_graph_event);
  /// A forward whose earlier backward is pending: another capture (microbatches in flight) or an error; eager is not allowed.
  TORCH_ARG(OnChange, on_pending) = OnChange::capture;
  /// New values of arguments that are not tensors, new shapes, dtypes or requires_grad.
  TORCH_ARG(OnChange, on_new_arguments) = OnChange::capture;
  /// Parameters or buffers whose storage was relocated since the capture (load, Module::to): recapture, or an error.
  TORCH_ARG(OnChange, on_relocated_weights) = OnChange::capture;
  /// Captures of one call (microbatches in flight times argument variants) before a further one is an error.
  TORCH_ARG(int64_t, max_captures) = 8;
};

}  // namespace sidestream
