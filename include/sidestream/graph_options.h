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

namespace sidestream {

class GraphEvent;
class GraphPool;

/// Parameters or buffers lie elsewhere than at the capture (load, Module::to): capture anew, or a UsageError.
enum class OnRelocatedWeights : std::uint8_t { capture, error };

/// What becomes of the gradient of a parameter that a backward graph has computed.
enum class GradientPolicy : std::uint8_t {
  cloned,  ///< autograd gets a copy of its own
  owned,  ///< autograd gets the graph's memory. What somebody still holds of it is copied out before a graph writes it again.
  accumulated,  ///< the graph adds into `.grad` (see `accumulate_in_graph`)
};

/// A policy for the parameters that a pattern names.
struct GradientRule {
  std::string pattern;
  GradientPolicy policy = GradientPolicy::cloned;
};

/// How forward and backward are captured and replayed, by `ss::call` and by make_graphed_callables alike. In brackets: the
/// reference systems' word. Throws (where it is used): UsageError for a number below its bound, for an event without a
/// stream, for an event whose stream is the current one, and for `side_streams` beside a stream of the caller's.
struct GraphOptions {
  /// Adds a rule for parameters: their dotted names in the engine's model, and behind the name of the call those that only the
  /// module of a callable has; a tensor that a function reads and no module registers goes by the name of the call. Of rules that
  /// fit a parameter the last one counts, and without any `accumulate_in_graph` does. A capture keeps the policies that it was
  /// made with. Throws (at the capture): UsageError for a pattern that fits no parameter.
  GraphOptions& gradients(std::string pattern, GradientPolicy policy) {
    gradients_.push_back({std::move(pattern), policy});
    return *this;
  }
  [[nodiscard]] const std::vector<GradientRule>& gradients() const noexcept { return gradients_; }

  /// Eager passes before the capture, on the capture stream, offload off [num_warmup_iters]. The sizing pass runs even at 0.
  TORCH_ARG(int64_t, num_warmup_iters) = 3;
  /// Called once before all warm-up passes, on the capture stream [pre_warmup_hook].
  TORCH_ARG(std::function<void()>, pre_warmup_hook);
  /// Called once after all warm-up passes, on the capture stream [post_warmup_hook].
  TORCH_ARG(std::function<void()>, post_warmup_hook);
  /// An input that requires a gradient may get none [allow_unused_input].
  TORCH_ARG(bool, allow_unused_input) = false;
  /// Generators of the device that bodies draw from, beside its default one: each replay draws on from them as an eager call would,
  /// and warm-ups and captures leave them as they were. A draw from a generator that is not named is a CaptureError; a named one of
  /// another device is a UsageError. The captures keep them [register_generator_state].
  TORCH_ARG(std::vector<at::Generator>, generators);
  /// Graphs of the forward alone, which keep nothing for a backward, for calls under no_grad: validation, sampling. They may compute in
  /// training's memory, see `pool`. Of make_graphed_callables alone (`ss::call` has CallOptions::on_evaluation), and beside
  /// no option that is about backwards: else a UsageError.
  TORCH_ARG(bool, forward_only) = false;
  /// Keeps saved activations through a backward, so that it can run twice; costs memory [retain_graph_in_backward].
  TORCH_ARG(bool, retain_graph_in_backward) = false;
  /// The backward graph adds into `.grad` itself, the fast way. It then owns those buffers: `.grad` set to none is zeroed and
  /// attached again at the next replay, another tensor in its place is a UsageError. The policy `accumulated` for all parameters
  /// that no rule names.
  TORCH_ARG(bool, accumulate_in_graph) = false;
  /// Side streams that consecutive forward graphs rotate over; at least 1, and 1 where nothing is given. Where `Options::lag` is
  /// not given, copies trail by as many calls.
  TORCH_ARG(std::optional<int64_t>, side_streams);
  /// The caller's stream to replay on, in place of side streams [cuda_graph_stream].
  TORCH_ARG(std::optional<c10::Stream>, cuda_graph_stream);
  /// The caller's event, recorded inside each graph when its compute is done; needs `cuda_graph_stream` [cuda_graph_event].
  TORCH_ARG(std::shared_ptr<GraphEvent>, cuda_graph_event);
  /// Memory that these captures share with others [pool]: see GraphPool. Of another device than the engine's: UsageError.
  TORCH_ARG(std::shared_ptr<GraphPool>, pool);
  /// Whether to capture now, for trainers of several ranks: warm-up and capture run the calls' bodies, and any collectives in them,
  /// more often than a step does, so all ranks must capture in the same step. `mine`: this rank has something to capture. Let it
  /// give the logical and of that over all ranks. Where it gives false, those calls run eagerly and are asked for again.
  /// Asked by OffloadEngine::step, each time after the first step, on the step's thread; with `true` by make_graphed_callables
  /// (false is a UsageError there) and by a callable whose weights were relocated. What it throws comes out of that call.
  TORCH_ARG(std::function<bool(bool mine)>, agree_to_capture);
  /// What a replay does where weights were relocated since its capture.
  TORCH_ARG(OnRelocatedWeights, on_relocated_weights) = OnRelocatedWeights::capture;

 private:
  std::vector<GradientRule> gradients_;
};

}  // namespace sidestream
