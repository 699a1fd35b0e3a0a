#pragma once
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "sidestream/detail/export.h"
#include "sidestream/journal.h"
#include "sidestream/options.h"
#include "sidestream/report.h"

namespace sidestream {

class EngineAccess;
class EngineState;

/// One training step: from the forward pass through the optimizer. Scopes and calls on this thread belong to it while it lives.
/// Ordering: at its end the current stream waits for every copy of the step, and so do streams that saved in it. A stream that
/// only reads what others saved is unknown to the engine: at::Tensor::record_stream, as without offload.
/// Threads: ends on the thread it began on. Steps of several engines may be active on one thread, and end in any order; calls and
/// scopes belong to the one that began last.
class [[nodiscard]] SIDESTREAM_API Step {
 public:
  /// What was moved from has ended.
  Step(Step&& other) noexcept : state_(std::move(other.state_)), exceptions_(other.exceptions_) {}
  Step& operator=(Step&&) = delete;
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;
  /// Ends the step; again, it does nothing. Throws: UsageError on another thread than it began on (the step stays active) and where
  /// a scope is still open; what the device refuses.
  void finish();
  /// Ends the step where `finish` has not. Never throws: a failure is kept, logged through LibTorch's warnings, and thrown by the
  /// engine's next `step()` (by nothing else). Left by an exception, the step is cleaned up, and the exception says more.
  ~Step();

 private:
  friend class OffloadEngine;
  explicit Step(std::shared_ptr<EngineState> state);
  std::shared_ptr<EngineState> state_;
  int exceptions_;
};

/// Offloads what autograd saves to pinned host memory while later work computes, reloads it before backward needs it, and
/// captures calls into graphs that do the same. The first step runs eagerly, offloads and counts: the sizing pass.
///
/// The model must outlive the engine, which shares in it where a std::shared_ptr owns it; names come from
/// `model.named_modules()`. Engine and model may go before a backward that is pending.
/// Threads: one step at a time. Capture: not to be made or stepped inside a capture of the user's.
/// Throws: UsageError for bad options, and where autograd's saved tensors cannot be seen (Python's engine is loaded);
///         DeviceError where the device cannot be used.
class SIDESTREAM_API OffloadEngine {
 public:
  OffloadEngine(torch::nn::Module& model, Options options);
  /// What was moved from throws UsageError.
  OffloadEngine(OffloadEngine&&) noexcept = default;
  OffloadEngine& operator=(OffloadEngine&&) = delete;
  OffloadEngine(const OffloadEngine&) = delete;
  OffloadEngine& operator=(const OffloadEngine&) = delete;
  ~OffloadEngine();

  /// Begins a step. The second one first captures what the first one called. Throws: UsageError while another step lives, inside
  /// this engine's captures, or when a pattern matches nothing; what the end of an earlier step could not throw; CaptureError when a capture fails (nothing of it is left; the step may be tried again).
  [[nodiscard]] Step step();

  /// Keeps the tensor's storage on the device for as long as it lives.
  void mark_not_offload(const at::Tensor& tensor);

  [[nodiscard]] Report report() const;
  /// What the checked steps asked of the device; empty without Options::check_steps.
  [[nodiscard]] Journal journal() const;

  /// Draws every graph that is captured by now into `folder`, which is made where it is missing: one file a graph, in the language of
  /// Graphviz (`dot -Tsvg FILE`), with the operator and the scope that each node was captured in, events, copies beside the graph and
  /// bytes. Returns the files. Ordering: none; reads no device memory.  Capture: illegal.  Threads: the step's.
  /// Throws: UsageError where a file cannot be written, before the first capture too; each file is there whole, or as it was.
  std::vector<std::string> write_graphs(const std::string& folder) const;

  /// Drops all captures and the plan: the next step is a sizing pass again. Throws: UsageError inside a step.
  void reset();

 private:
  friend class EngineAccess;
  explicit OffloadEngine(std::shared_ptr<EngineState> state);
  [[nodiscard]] EngineState& state() const;
  std::shared_ptr<EngineState> state_;
};

}  // namespace sidestream
