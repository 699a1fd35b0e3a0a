#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <c10/core/Stream.h>
#include <torch/arg.h>

#include "sidestream/pipeline_order.h"

namespace sidestream {

class GraphEvent;
class GraphPool;

/// What a replay does if parameters or buffers were relocated since the capture (by load or Module::to).
enum class OnRelocatedWeights : std::uint8_t {
  capture,  ///< captures again
  error,    ///< throws UsageError
};

/// How autograd gets the gradient of a parameter that a backward graph has computed.
enum class GradientPolicy : std::uint8_t {
  cloned,  ///< autograd gets a copy
  owned,  ///< autograd gets the graph's memory; a gradient that is still referenced is copied out before it is overwritten
  /// The graph adds into `.grad`, which is fast, and owns that memory. If `.grad` is unset, the graph's memory is zeroed and attached
  /// again at the next replay. If `.grad` is another tensor that other code refers to as well, the replay is a UsageError.
  accumulated,
  /// The gradient is computed by `backward_dw`, in a graph of its own after the backward, and autograd gets a copy then [backward_dw]. The
  /// backward computes other gradients only, if that is possible: see docs/pipelines.md. If a call runs eagerly, its backward computes
  /// all gradients at once.
  delayed,
};

/// A policy for the parameters that a pattern names.
struct GradientRule {
  std::string pattern;                             ///< see GraphOptions::gradients
  GradientPolicy policy = GradientPolicy::cloned;  ///< for the parameters that match
};

/// How forward and backward are captured and replayed, by `ss::call` and by make_graphed_callables alike.
///
/// Each option is a chained setter; without an argument it gives the value. A word in brackets is the option's name in TransformerEngine
/// or PyTorch.
/// Throws (when the options are used): UsageError for a number below its bound, and for `side_streams` together with
/// `cuda_graph_stream`. Also for an event without a stream, and for an event whose stream is the current one.
struct GraphOptions {
  /// Adds a rule for the gradients of the parameters that a pattern (or a comma-separated list) names; "**" names all of them. The last
  /// rule that matches a parameter counts. If no rule matches it, its gradient is cloned.
  ///
  /// A pattern is compared with the parameter's dotted name in the engine's model. If only the module of a callable has the parameter,
  /// its name is the callable's name, a dot, and its name in that module. A tensor that a function reads and no module registers has the
  /// name of the call. A capture keeps the policies that it was made with.
  /// Throws (at the capture): UsageError for a pattern that matches nothing.
  GraphOptions& gradients(std::string pattern, GradientPolicy policy) {
    gradients_.push_back({std::move(pattern), policy});
    return *this;
  }
  /// The rules in the order in which they were added.
  [[nodiscard]] const std::vector<GradientRule>& gradients() const noexcept { return gradients_; }

  /// Number of eager passes before the capture, on the capture stream and without offload [num_warmup_iters]. A sizing pass runs
  /// even if it is 0.
  TORCH_ARG(int64_t, num_warmup_iters) = 3;
  /// Called once before all warm-up passes, on the capture stream [pre_warmup_hook].
  TORCH_ARG(std::function<void()>, pre_warmup_hook);
  /// Called once after all warm-up passes, on the capture stream [post_warmup_hook].
  TORCH_ARG(std::function<void()>, post_warmup_hook);
  /// Allows an input that requires a gradient to get none [allow_unused_input].
  TORCH_ARG(bool, allow_unused_input) = false;
  /// Generators of the device, besides its default one, from which the captured code draws [register_generator_state]. Each replay
  /// continues from their state as an eager call would. Warm-ups and captures leave their state unchanged. The captures keep the
  /// generators alive. A draw from a generator that is not named is a CaptureError. A named generator of another device is a UsageError.
  TORCH_ARG(std::vector<at::Generator>, generators);
  /// Captures the forward alone, for calls under no_grad (validation, sampling). Nothing is kept for a backward. Such graphs may
  /// compute in the memory of training graphs: see `pool`.
  /// For make_graphed_callables only; `ss::call` has CallOptions::on_evaluation. Together with an option about the backward it is a
  /// UsageError.
  TORCH_ARG(bool, forward_only) = false;
  /// Keeps saved tensors through a backward, so that it can run twice [retain_graph_in_backward]. Costs memory.
  TORCH_ARG(bool, retain_graph_in_backward) = false;
  /// Number of side streams over which consecutive forward graphs rotate, at least 1. Not set: 1. If Options::lag is not set, this is
  /// also the number of calls by which copies trail. If neither is set: two calls; on a GPU more if that removes waits (Options::lag).
  TORCH_ARG(std::optional<int64_t>, side_streams);
  /// A stream of the caller's on which all graphs replay, in place of side streams [cuda_graph_stream].
  TORCH_ARG(std::optional<c10::Stream>, cuda_graph_stream);
  /// An event of the caller's that each graph records when its compute is done [cuda_graph_event]. Needs `cuda_graph_stream`.
  TORCH_ARG(std::shared_ptr<GraphEvent>, cuda_graph_event);
  /// Device memory that these captures share with others [pool]: see GraphPool. UsageError for a pool of another device.
  TORCH_ARG(std::shared_ptr<GraphPool>, pool);
  /// The order in which the callables run in a step, as `pipeline_order` gives it [_order]. Not set: all forwards, then all backwards.
  ///
  /// Each callable is captured once for each microbatch of its virtual stage (Callable::stage), in this order and in one pool of memory. A
  /// graph may use the memory of chunks whose backward comes before it. If the order repeats one part, and no chunk is in flight after a
  /// part, all parts share captures.
  /// A call replays the capture of the chunk that is open (OffloadEngine::chunk). If none is open, it replays that of the next microbatch;
  /// each step begins with the first one. Outside of steps, so does a pass after one that was complete, or that ended with a forward.
  /// Chunks without a backward have no captures: run them under no_grad.
  /// If a forward or a backward needs memory that the order gives to an earlier chunk until its backward, it throws UsageError, and nothing
  /// has been queued. Delayed weight gradients may be entries of the order. If they are not, compute them after its last entry, and those
  /// of microbatches that share captures before the next of these microbatches begins.
  /// For make_graphed_callables only. CallOptions::max_captures of the engine bounds the captures of a callable.
  /// Throws (at the capture): UsageError for an order that no step can take, and for more captures than the bound allows. Also for stages
  /// without callables, callables without a stage of the order, and options that do not go with an order.
  TORCH_ARG(std::vector<PipelineStep>, order);
  /// Asks all ranks whether to capture now, for trainers of several ranks. Warm-up and capture run the calls more often than a step does,
  /// and any collectives in them too. So all ranks must capture in the same step.
  ///
  /// `mine` says that this rank has something to capture. Return the logical and of `mine` over all ranks. If the result is false, the
  /// calls run eagerly in this step, and the next step asks again.
  /// OffloadEngine::step asks on its thread at each step after the sizing pass. make_graphed_callables, make_bucketed_callables and
  /// make_graphed_step ask with `true` before each capture, and so does a GraphedStep that captures other shapes: there false is a
  /// UsageError. A callable asks with `true` before it captures again or captures a further bucket. An exception from it ends the call that
  /// asked.
  TORCH_ARG(std::function<bool(bool mine)>, agree_to_capture);
  /// What a replay does if weights were relocated since its capture.
  TORCH_ARG(OnRelocatedWeights, on_relocated_weights) = OnRelocatedWeights::capture;

 private:
  std::vector<GradientRule> gradients_;
};

}  // namespace sidestream
