#pragma once
#include <memory>

#include <torch/nn/module.h>

#include "sidestream/export.h"
#include "sidestream/journal.h"
#include "sidestream/options.h"
#include "sidestream/report.h"

namespace sidestream {

class EngineAccess;
class EngineState;

/// One training step: from the forward pass through the optimizer. Scopes and calls on this thread belong to it while it lives.
/// Ordering: at its end the current stream waits for every copy of the step, and so do streams that saved in it. A stream that
/// only reads what others saved is unknown to the engine: at::Tensor::record_stream, as without offload.
/// Threads: ends on the thread it began on.
/// Its end may throw: hold it in a variable of its own; a std::optional terminates the program instead.
class [[nodiscard]] SIDESTREAM_API Step {
 public:
  Step(Step&& other) noexcept : state_(std::move(other.state_)), exceptions_(other.exceptions_) {}
  Step& operator=(Step&&) = delete;
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;
  /// Left by an exception, it cleans up and does not throw.
  ~Step() noexcept(false);

 private:
  friend class OffloadEngine;
  explicit Step(std::shared_ptr<EngineState> state);
  std::shared_ptr<EngineState> state_;
  int exceptions_;
};

/// Offloads what autograd saves to pinned host memory while later work computes, reloads it before backward needs it, and
/// captures calls into graphs that do the same. The first step runs eagerly, counts, and is the sizing pass.
///
/// The model must outlive the engine; names come from `model.named_modules()`.
/// Threads: one step at a time. Capture: not to be made or stepped inside a capture of the user's.
/// Throws: UsageError for bad options, and where autograd's saved tensors cannot be seen (Python's engine is loaded);
///         DeviceError where the device cannot be used.
class SIDESTREAM_API OffloadEngine {
 public:
  OffloadEngine(torch::nn::Module& model, Options options);
  /// What was moved from may only be destroyed.
  OffloadEngine(OffloadEngine&&) noexcept = default;
  OffloadEngine& operator=(OffloadEngine&&) = delete;
  OffloadEngine(const OffloadEngine&) = delete;
  OffloadEngine& operator=(const OffloadEngine&) = delete;
  ~OffloadEngine();

  /// Begins a step. The second one first captures what the first one called. Throws: UsageError while another step lives or
  /// when a pattern matches nothing; CaptureError when a capture fails (nothing of it is left; the step may be tried again).
  [[nodiscard]] Step step();

  /// Keeps the tensor's storage on the device for as long as it lives.
  void mark_not_offload(const at::Tensor& tensor);

  [[nodiscard]] Report report() const;
  /// What the checked steps asked of the device; empty without Options::check_steps.
  [[nodiscard]] Journal journal() const;

  /// Drops all captures and the plan: the next step is a sizing pass again. Throws: UsageError inside a step.
  void reset();

 private:
  friend class EngineAccess;
  explicit OffloadEngine(std::shared_ptr<EngineState> state);
  std::shared_ptr<EngineState> state_;
};

}  // namespace sidestream
