#pragma once
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "graphs/calls/call_table.h"
#include "graphs/calls/dispatcher.h"
#include "graphs/calls/engine_counts.h"
#include "graphs/calls/engine_sequences.h"
#include "graphs/calls/recorded_calls.h"
#include "graphs/calls/step_chunks.h"
#include "graphs/engine/budget_plan.h"
#include "graphs/engine/step_session.h"
#include "graphs/resources/call_context.h"
#include "graphs/resources/eager_plan.h"
#include "graphs/resources/engine_resources.h"
#include "graphs/resources/step_memory.h"
#include "graphs/verify/replay_verification.h"
#include "sidestream/detail/module_forward.h"

namespace sidestream {

class PartsOfEnd;

/// The parts of one OffloadEngine, and the order in which they act at a step's begin and end. Callables share it.
///
/// Its parts have the state: EagerPlan::State says how much is known, a StepSession exists while a step is
/// active, CallContext::Phase says what calls run inside of.
/// Threads: the step's; see the parts for what other threads may call.
class EngineState {
 public:
  /// `runtime`: null makes that of the options' device.
  EngineState(torch::nn::Module& model, Options options, std::shared_ptr<Runtime> runtime = nullptr);
  EngineState(const EngineState&) = delete;
  EngineState& operator=(const EngineState&) = delete;
  ~EngineState() = default;

  /// `order`: of its chunks; null if there is none.
  void begin_step(const std::vector<PipelineStep>* order = nullptr);
  /// `self` owns this object.
  [[nodiscard]] static Chunk begin_chunk(const std::shared_ptr<EngineState>& self, const ChunkId& id);
  [[nodiscard]] StepChunks& chunks() noexcept { return chunks_; }
  /// A whole step's graph was launched, which holds these copies: they count in the step that is active, else as a step's.
  void copied_in_graph(const CopyCounts& copies) noexcept;
  /// `failed`: an exception is on its way.
  void end_step(bool failed);
  /// Ends the trace of a step that did not fail.
  void end_trace();
  /// Throws: UsageError on another thread than the step began on, and inside of a call.
  void check_end_of_step() const;
  /// `end_step` for a destructor: a failure is kept, and thrown by the next `begin_step`.
  void close_step(bool failed) noexcept;
  /// A call of `ss::call`.
  void dispatch(const detail::CallRequest& request, detail::TensorBuffer& outputs) {
    if (CallSite* const site = calls_.site_for(request); site != nullptr) {
      dispatcher_.dispatch(*site, request, outputs);
    } else {
      request.run(request.context, outputs);
    }
  }
  /// A call of a GraphedCallable, whose site it holds.
  void dispatch(CallSite& site, const detail::CallRequest& request, detail::TensorBuffer& outputs) {
    dispatcher_.dispatch(site, request, outputs);
  }
  [[nodiscard]] Report report() const;
  [[nodiscard]] Journal journal() const { return resources_.check.journal(); }
  void reset();
  void backward_dw();
  void backward_dw(const ChunkId& id);
  /// Each of `named` is a switch of its own.
  void set_activation_offloading(const std::vector<NamePatterns>& named, bool on);
  std::vector<std::string> write_graphs(const std::string& folder) const;
  [[nodiscard]] std::string trace_json() const;

  [[nodiscard]] EngineSequences& sequences() noexcept { return sequences_; }
  [[nodiscard]] const EngineSequences& sequences() const noexcept { return sequences_; }
  /// Not owned by the pointer.
  [[nodiscard]] std::shared_ptr<const torch::nn::Module> model() const { return calls_.model(); }
  [[nodiscard]] const CallTable& calls() const noexcept { return calls_; }
  [[nodiscard]] ScopeTree& tree() noexcept { return resources_.tree; }
  void mark_not_offload(const at::Tensor& tensor);
  [[nodiscard]] Runtime& runtime() noexcept { return *resources_.runtime; }
  [[nodiscard]] EngineResources& resources() noexcept { return resources_; }
  /// For counts of what callers of this object do.
  [[nodiscard]] EngineCounts& counts() noexcept { return counts_; }
  [[nodiscard]] const HostArena& arena() const noexcept { return *resources_.arena; }

 private:
  /// One that was destroyed on another thread, or inside of a call.
  void end_abandoned_step();
  /// Throws the error that a destructor could not throw.
  void throw_kept();
  void refuse_inside(const char* what) const;
  /// Throws: UsageError as refuse_inside, inside of a graphed call, and on another thread than the step's.
  void refuse_in_call(const char* what) const;
  /// Throws: UsageError as refuse_in_call, and outside of a step.
  void refuse_outside_of_step(const char* what) const;
  /// Throws inside of a capture, and inside of a step.
  void refuse_inside_step(const std::string& what);
  /// The next step is a sizing pass, and calls of `ss::call` have no captures.
  void forget_captures();
  /// All that is captured or planned between the sizing pass and a step that follows it.
  void make_ready();
  /// Live bytes, without samples for captures, and as if each parameter had its gradient.
  [[nodiscard]] std::int64_t lasting_bytes() const;
  /// At a step's end. Throws: UsageError if weight gradients are delayed still. They are dropped.
  void refuse_missing_weights(bool failed);
  /// The current stream waits for the copies of all sequences. Returns the counts of the step.
  [[nodiscard]] GraphSequence::Counts join_sequences(PartsOfEnd& parts);
  /// Takes the counts of a step that did not fail into the report.
  void take_results(StepSession& step, const CopyCounts& copies);

  std::shared_ptr<const torch::nn::Module> model_;  ///< shares ownership if it has an owner
  EngineResources resources_;
  CallContext context_;
  CallTable calls_;
  RecordedCalls recorded_;
  EagerPlan eager_plan_;
  EngineCounts counts_;
  EngineSequences sequences_;
  BudgetPlan budget_;
  StepChunks chunks_;
  std::unique_ptr<ReplayVerification> verification_;  ///< null if no replay is verified
  Dispatcher dispatcher_;
  StepMemory memory_;
  std::optional<StepSession> step_;                    ///< empty between steps
  std::optional<std::int64_t> lasting_before_sizing_;  ///< until the next step begins
  bool making_ready_ = false;
  std::mutex kept_;  ///< a step may be left on another thread than the next begins on
  bool step_was_abandoned_ = false;
  bool failed_ = false;  ///< the latest step
  bool pins_ = false;    ///< it failed, and groups of it found no pinned memory: the next one pins as it goes
  std::exception_ptr kept_failure_;
};

}  // namespace sidestream
