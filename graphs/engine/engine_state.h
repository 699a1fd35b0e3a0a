#pragma once
#include <memory>
#include <vector>

#include <torch/nn/module.h>

#include "graphs/engine/call_context.h"
#include "graphs/engine/call_table.h"
#include "graphs/engine/dispatcher.h"
#include "graphs/engine/eager_plan.h"
#include "graphs/engine/engine_chains.h"
#include "graphs/engine/engine_resources.h"
#include "graphs/engine/recorded_calls.h"
#include "graphs/engine/report_builder.h"
#include "graphs/engine/step_session.h"

namespace sidestream {

class PartsOfEnd;

/// All that one OffloadEngine owns, and the order in which its parts act at a step's begin and end. Callables share it.
///
/// What state it is in is told by its parts: EagerPlan::State says how much is known, a StepSession exists while a step is
/// active, CallContext::Phase says what calls run inside of.
/// Threads: the step's; see the parts for what other threads may call.
class EngineState {
 public:
  /// `runtime`: null makes that of the options' device.
  EngineState(torch::nn::Module& model, Options options, std::shared_ptr<Runtime> runtime = nullptr);
  EngineState(const EngineState&) = delete;
  EngineState& operator=(const EngineState&) = delete;
  ~EngineState() = default;

  void begin_step();
  /// `failed`: an exception is on its way.
  void end_step(bool failed);
  /// A call of `ss::call`.
  void dispatch(const detail::CallRequest& request, detail::TensorBuffer& outputs) {
    dispatcher_.dispatch(calls_.site_for(request), request, outputs);
  }
  /// A call of a GraphedCallable, whose site it holds.
  void dispatch(CallSite& site, const detail::CallRequest& request, detail::TensorBuffer& outputs) {
    dispatcher_.dispatch(site, request, outputs);
  }
  [[nodiscard]] Report report() const { return report_.build(resources_, chains_, eager_plan_, calls_); }
  [[nodiscard]] Journal journal() const { return resources_.check.journal(); }
  void reset();

  [[nodiscard]] EngineChains& chains() noexcept { return chains_; }
  [[nodiscard]] const EngineChains& chains() const noexcept { return chains_; }
  [[nodiscard]] ScopeTree& tree() noexcept { return resources_.tree; }
  [[nodiscard]] Exclusions& exclusions() noexcept { return resources_.exclusions; }
  [[nodiscard]] Runtime& runtime() noexcept { return *resources_.runtime; }
  [[nodiscard]] const HostArena& arena() const noexcept { return *resources_.arena; }

 private:
  /// All that is captured or planned between the sizing pass and a step that follows it.
  void make_ready();
  /// The current stream waits for the copies of all chains. What they did in the step.
  [[nodiscard]] Chain::Counts join_chains(PartsOfEnd& parts);
  /// Of a step that went well.
  void take_results(const StepSession& step, const Chain::Counts& replays);

  EngineResources resources_;
  CallContext context_;
  CallTable calls_;
  RecordedCalls recorded_;
  EagerPlan eager_plan_;
  ReportBuilder report_;
  EngineChains chains_;
  Dispatcher dispatcher_;
  std::unique_ptr<StepSession> step_;  ///< null between steps
};

}  // namespace sidestream
