#pragma once
#include <memory>
#include <string>
#include <vector>

#include "sidestream/chunk.h"
#include "sidestream/detail/export.h"
#include "sidestream/detail/module_forward.h"
#include "sidestream/journal.h"
#include "sidestream/options.h"
#include "sidestream/pipeline_order.h"
#include "sidestream/report.h"

namespace sidestream {

class EngineAccess;
class EngineState;

/// One training step, from the forward pass through the optimizer. While it lives, scopes and calls on its thread belong to it.
///
/// Steps of several engines may be active on one thread and may end in any order. Scopes and calls belong to the step that began last.
/// Ordering: at its end, the current stream and all streams that saved tensors in the step wait for every copy of the step. The engine
/// does not know streams that only read saved tensors: call at::Tensor::record_stream for such streams, as you would without offload.
/// Call it before the scope ends, and also for the stream that allocated the tensor if it is not one that saves it.
/// Threads: ends on the thread on which it began.
class [[nodiscard]] SIDESTREAM_API Step {
 public:
  /// A step that was moved from counts as ended.
  Step(Step&& other) noexcept : state_(std::move(other.state_)), exceptions_(other.exceptions_) {}
  Step& operator=(Step&&) = delete;
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;
  /// Ends the step. A second call does nothing.
  /// Throws: UsageError on another thread, or inside of a call; the step then stays active. UsageError if a scope or a chunk is still open,
  /// or if chunks of the step's order did not come. UsageError if backward_dw was not called for delayed weight gradients. Also throws what
  /// a scope's destructor could not throw, and errors of the device.
  void finish();
  /// Ends the step if `finish` has not. Never throws: a failure is logged as a LibTorch warning, and the engine's next `step()` throws it.
  /// If an exception ends the step, the step is cleaned up and errors of the cleanup are dropped.
  ~Step();

 private:
  friend class OffloadEngine;
  Step(std::shared_ptr<EngineState> state, const std::vector<PipelineStep>* order);
  std::shared_ptr<EngineState> state_;
  int exceptions_;
};

/// Offloads saved tensors to pinned host memory while later work computes, and reloads them before backward needs them. It also captures
/// calls into graphs; the copies of these calls run beside the graphs.
///
/// The first step is the sizing pass: it runs eagerly, offloads, and measures. Names come from `model.named_modules()`.
/// If a std::shared_ptr owns the model, the engine shares the ownership; else the model must outlive the engine. Engine and model may be
/// destroyed before a pending backward has run, but for the backward of an `ss::call` with delayed weight gradients, which needs the engine.
/// Threads: one step at a time.  Capture: make no engine and begin no step inside a capture of your own.
class SIDESTREAM_API OffloadEngine {
 public:
  /// Makes an engine for `model` on the device of `options`.
  /// Throws: UsageError for bad options, for settings of LibTorch's allocator with which offload or graphs cannot work, and if Python's
  /// autograd engine is loaded, which hides saved tensors. DeviceError if the device cannot be used.
  OffloadEngine(torch::nn::Module& model, Options options);
  /// Functions of an engine that was moved from throw UsageError.
  OffloadEngine(OffloadEngine&&) noexcept = default;
  OffloadEngine& operator=(OffloadEngine&&) = delete;
  OffloadEngine(const OffloadEngine&) = delete;
  OffloadEngine& operator=(const OffloadEngine&) = delete;
  ~OffloadEngine();

  /// Begins a step. First it captures the calls that the previous step ran eagerly and recorded. So the calls of the first step are
  /// captured when the second step begins.
  /// Throws: UsageError while another step of this engine lives, inside this engine's captures, and for a pattern that matches nothing. The
  /// failure of an earlier ~Step: then no step begins, so call `step()` again. If a capture fails, its error: CaptureError, DeviceError if
  /// the device is full, UsageError if a call breaks a rule, or an exception of the call. Nothing of the capture is left, and `step()` may
  /// be tried again.
  [[nodiscard]] Step step();
  /// The same, for a step whose chunks run in `order`: what `pipeline_order` gives for this rank, or an order of your own.
  ///
  /// Chunks must begin in the order of its forwards. Calls are captured in this order too (docs/pipelines.md): if the backward of a graphed
  /// call comes before its turn, it throws UsageError.
  /// Throws: as `step()`. Also UsageError for a bad `order`, and then no step begins: an entry that occurs twice, a number below 0, a
  /// backward that is not after its forward, weight gradients that are not after their backward. The step's end throws UsageError for
  /// chunks that did not come.
  [[nodiscard]] Step step(const std::vector<PipelineStep>& order);

  /// Begins the forward of one chunk in the active step: see Chunk.
  /// Throws: UsageError without a step, on another thread than the step's, and inside a graphed call or a capture. Also for numbers below
  /// 0, for a chunk that the step has had, and for one that is not next in the step's order. If it throws, the chunk has not begun.
  [[nodiscard]] Chunk chunk(ChunkId id);

  /// Keeps the tensor's storage on the device for as long as the storage lives [mark_not_offload]. Call it before the end of the scope that
  /// saves the tensor. It also works outside of steps. A mark between graphed calls of ss::call counts in their captures only if the
  /// recorded step made it; replays do not see later marks. For callables, mark the argument inside the body.
  void mark_not_offload(const at::Tensor& tensor);

  /// Switches offload off, or on again, for all that is saved in calls and scopes of `module` and of the modules inside of it
  /// [set_activation_offloading]. Off wins over Options::offload and Options::delay, in eager steps and in graphs. On again, what the
  /// options name is offloaded.
  ///
  /// A scope belongs to a module if its name is a name that the model has for the module, or begins with such a name and a dot. After the
  /// first step, a module without such a scope is a UsageError. Of several switches that name one scope, the latest holds.
  /// If a switch changes a scope that was entered before, all captures are made again. For `ss::call` and eager scopes it does what `reset`
  /// does: the next step is a sizing pass. A callable or a whole step captures again at its next call, or at the first one for which no
  /// backward of it is pending; until then it replays the old capture.
  /// Ordering: none.  Capture: illegal.  Threads: the step's.
  /// Throws: UsageError for a module that is not part of the model, inside a step and inside a capture; nothing changes then.
  /// Source: TransformerEngine's set_activation_offloading of operators.
  void set_activation_offloading(const torch::nn::Module& module, bool on);
  /// The same for calls and scopes by their names: a pattern or a comma-separated list, as in Options. A pattern names scopes, but not the
  /// scopes inside of them. "all" switches offload off and on for a stretch of steps [disable_offload, enable_offload].
  void set_activation_offloading(const std::string& patterns, bool on);

  /// Computes the delayed weight gradients (GradientPolicy::delayed) of all backwards that still lack them, in the order of these backwards
  /// [backward_dw]. If there are none, it does nothing: an eager backward computes all gradients itself.
  ///
  /// Call it after each backward, or once after several; at the latest before the step ends. A graphed call whose weight gradients are
  /// delayed is in flight: its next forward uses another capture, as with a pending backward.
  /// Ordering: as a backward.  Capture: illegal.  Threads: the step's.
  /// Throws: UsageError if a tensor that the gradients are computed from was changed in place. What hooks of the parameters throw; the
  /// rest is not computed then. A backward() that fails leaves nothing to compute.
  void backward_dw();
  /// The same for the calls and callables of one chunk. Call it once for each chunk, after its backward.
  /// Throws: UsageError also if the step has not had the chunk, and at the second call for it. If the options delay parameters
  /// (GradientPolicy::delayed), also before the chunk's backward; without delayed parameters that may go unnoticed.
  void backward_dw(ChunkId id);

  /// What the engine has done so far.
  /// Ordering: blocks the host until the work of the step that was traced is done, once.
  [[nodiscard]] Report report() const;
  /// The journal of the checked steps. Empty without Options::check_steps.
  [[nodiscard]] Journal journal() const;

  /// The step that was traced (Report::traced_step), in the Trace Event Format: open it in Perfetto or in chrome://tracing.
  ///
  /// It has graphs, copies, and waits of compute for copies, and the live device memory. If the device keeps no time, all times are those
  /// at which the host queued the work. A GraphedStep is traced only if it is called inside of a step of the engine.
  /// Ordering: blocks the host until that step's work is done.  Threads: the step's.
  /// Throws: UsageError if no step has been traced yet.
  [[nodiscard]] std::string trace_json() const;

  /// Draws every captured graph into `folder`, one file a graph, in the language of Graphviz (`dot -Tsvg FILE`). Returns the files' paths.
  ///
  /// A drawing shows each node with the operator and the scope that made it, events, copies beside the graph, and bytes. The folder is
  /// made if it is missing. After an error each file is either whole or as it was before.
  /// Ordering: none; reads no device memory.  Capture: illegal.  Threads: the step's.
  /// Throws: UsageError if a file cannot be written, also before the first capture.
  std::vector<std::string> write_graphs(const std::string& folder) const;

  /// Drops the captures of `ss::call`, the plan, and pinned memory that no callable or graphed step uses. A sizing pass comes next.
  /// Throws: UsageError inside a step or a capture.
  void reset();

 private:
  friend class EngineAccess;
  explicit OffloadEngine(std::shared_ptr<EngineState> state);
  [[nodiscard]] EngineState& state() const;
  std::shared_ptr<EngineState> state_;
};

}  // namespace sidestream
