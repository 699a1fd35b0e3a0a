#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/arg.h>

#include "sidestream/detail/export.h"
#include "sidestream/graph_options.h"
#include "sidestream/graphed_callable.h"

namespace sidestream {

/// How a whole step is captured and replayed.
struct StepOptions {
  /// What the graph does behind the last gradient, with each parameter's `.grad` in place: clip_grad_norm_, AdamW::step. It must own
  /// or outlive what it uses, and keep its state in tensors that exist before the capture. LibTorch's adaptive optimizers, which
  /// keep a step count on the host, and its clip_grad_norm_, which reads a value there, are refused by name.
  TORCH_ARG(std::function<void()>, update);
  /// The gradients of a call are added to those that the parameters have. Else they take their place, as if these were zeroed first.
  TORCH_ARG(bool, accumulate) = false;
  /// What the engine's Options::offload names leaves the device in the step's graph as well, by copies inside of the graph: see
  /// GraphedStep.
  TORCH_ARG(bool, offload) = true;
  /// How many captures a step may have. A call with inputs of other shapes, dtypes or another number of microbatches is captured
  /// then and there, with its inputs as samples; beyond the bound it is a UsageError.
  TORCH_ARG(int64_t, max_captures) = 1;
  /// Warm-up, streams, agreement of ranks, relocated weights. Nothing else of it may be set: a step has no backward of its own.
  TORCH_ARG(GraphOptions, graph);
};

/// A step function whose forward, backward and update replay as one graph; copies share its captures.
///
/// A call gives, for each microbatch, what the step function gave: its loss first. They have no history, and are the caller's own.
/// Afterwards each parameter that the loss leads to has its gradient in a `.grad` that the graph owns: setting it to none, zeroing or
/// scaling it in place is plain training's; another tensor that somebody else holds is a UsageError with `accumulate`.
/// What leaves the device leaves and comes back inside of the graph: work behind the step waits for the last copy.
/// Guards are a GraphedCallable's: autocast, switches and the model as captured, else UsageError; where the model's training flags are
/// others the step runs eagerly; relocated weights are captured anew, or refused by option.
/// Ordering: on return the current stream waits for all of the step.  Capture: illegal.  Threads: one at a time.
/// Throws: UsageError also under no_grad, for inputs that require a gradient and for parameters that have gradient hooks.
class SIDESTREAM_API GraphedStep {
 public:
  /// `microbatches[m]` are the inputs of microbatch m.
  std::vector<Tensors> operator()(const std::vector<Tensors>& microbatches) const;
  [[nodiscard]] const std::string& name() const;
  /// How many captures there are.
  [[nodiscard]] std::size_t captures() const;
  /// What leaves the device in each call, of the latest capture. Bytes.
  [[nodiscard]] std::uint64_t offloaded_bytes() const;
  /// Drops the graphs and their memory, not the gradients; idempotent. Later calls throw UsageError.
  void reset();

 private:
  friend class EngineAccess;
  class Shared;
  explicit GraphedStep(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}
  [[nodiscard]] Shared& shared() const;
  std::shared_ptr<Shared> shared_;  ///< by copies
};

/// Captures a whole step: for each microbatch `step` on its inputs and the gradients of its loss, then the update, as one graph.
///
/// `step` gives its loss, a tensor of one element, and whatever else is to come out. It calls no backward: the engine asks for the
/// gradients, of all leaves that the loss leads to. Its module (else the engine's model) is whose parameters and buffers are
/// guarded. `samples[m]` are the inputs of microbatch m; their values are used in warm-up, after which parameters, gradients, buffers,
/// the optimizer's state and the random state are as before.
/// Ordering: waits for the device.  Capture: illegal.
/// Throws: UsageError (no microbatch, no loss, options that do not fit), CaptureError (nothing of it is left).
/// Source: PyTorch's notes on CUDA graphs, "whole-network capture".
[[nodiscard]] SIDESTREAM_API GraphedStep make_graphed_step(OffloadEngine& engine, Callable step,
                                                           const std::vector<Tensors>& samples,
                                                           const StepOptions& options = {});

}  // namespace sidestream
