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
///
/// Each option is a chained setter; without an argument it gives the value.
struct StepOptions {
  /// The update, which the graph runs after the last gradient, with each parameter's `.grad` set: clip_grad_norm_, AdamW::step.
  ///
  /// The function must own all that it uses, or all that it uses must outlive it. Its state must be in tensors that exist before the
  /// capture. Two things are refused by name: LibTorch's adaptive optimizers, which keep a step count on the host, and LibTorch's
  /// clip_grad_norm_, which reads a value on the host.
  TORCH_ARG(std::function<void()>, update);
  /// Adds the gradients of a call to the gradients that parameters already have. If false, a call replaces them, and sets the `.grad` of
  /// its module's other parameters to none, as after a zero_grad.
  TORCH_ARG(bool, accumulate) = false;
  /// Offloads in the step's graph what the engine's Options::offload names. The copies are part of the graph: see GraphedStep.
  TORCH_ARG(bool, offload) = true;
  /// How many captures a step may have. A call with inputs of other shapes or dtypes, or with another number of microbatches, captures
  /// the step at once with its inputs as samples. Beyond the bound such a call is a UsageError.
  TORCH_ARG(int64_t, max_captures) = 1;
  /// Options for warm-up, generators, streams, agreement of ranks and relocated weights. No others may be set, because a step's
  /// backward does not replay on its own.
  TORCH_ARG(GraphOptions, graph);
};

/// A step function whose forward, backward and update replay as one graph. Copies of this object share its captures.
///
/// A call returns, for each microbatch, the outputs of the step function, the loss first. They have no autograd history and belong to the
/// caller. After the call, each parameter that the loss depends on has its gradient in a `.grad` whose memory the graph owns. You may
/// unset it, zero it or scale it in place, as in plain training. The next call writes the same memory: clone a gradient that you keep.
/// With `accumulate` you may also set another tensor. If other code refers to it too, the next call is a UsageError.
///
/// Groups are offloaded and reloaded inside the graph, so work after the step waits for the last copy.
/// The guards are those of a GraphedCallable. If autocast, global switches or the model differ from the capture, a call is a UsageError.
/// If only the model's training flags differ, it runs eagerly. If weights were relocated, GraphOptions::on_relocated_weights decides.
/// Ordering: on return the current stream waits for the whole step.  Capture: illegal.  Threads: one at a time.
/// Throws: UsageError also under no_grad, for inputs that require a gradient, and for parameters with gradient hooks.
class SIDESTREAM_API GraphedStep {
 public:
  /// Replays the step. `microbatches[m]` are the inputs of microbatch m, and `result[m]` its outputs.
  std::vector<Tensors> operator()(const std::vector<Tensors>& microbatches) const;
  /// The name of the step's callable.
  [[nodiscard]] const std::string& name() const;
  /// Number of captures.
  [[nodiscard]] std::size_t captures() const;
  /// Bytes that each call of the latest capture offloads.
  [[nodiscard]] std::uint64_t offloaded_bytes() const;
  /// Drops the graphs and their memory, but not the gradients. A second call does nothing. Later calls throw UsageError.
  void reset();

 private:
  friend class EngineAccess;
  class Shared;
  explicit GraphedStep(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}
  [[nodiscard]] Shared& shared() const;
  std::shared_ptr<Shared> shared_;  ///< shared by copies
};

/// Captures a whole step as one graph: for each microbatch the forward and the gradients of the loss, then the update.
///
/// `step` returns its loss, a tensor of one element, and any further outputs. It must not call backward: the engine computes the gradients
/// of all leaves that the loss depends on. The parameters and buffers of its module are guarded; if it has no module, those of the engine's
/// model.
/// `samples[m]` are the inputs of microbatch m; their values are used in warm-up. After that, parameters, gradients, buffers, the
/// optimizer's state and the random state are unchanged.
/// Ordering: waits for the device.  Capture: illegal.
/// Throws: UsageError without a microbatch or a loss, and for options that do not fit. CaptureError if the capture fails; nothing of it is
/// left.  Source: PyTorch's notes on CUDA graphs, "whole-network capture".
[[nodiscard]] SIDESTREAM_API GraphedStep make_graphed_step(OffloadEngine& engine, Callable step,
                                                           const std::vector<Tensors>& samples,
                                                           const StepOptions& options = {});

}  // namespace sidestream
