#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <torch/nn/module.h>

#include "graphs/engine/recorded_calls.h"
#include "graphs/replay/chain.h"
#include "observe/checked_runtime.h"
#include "offload/eager_offload.h"
#include "offload/exclusions.h"
#include "offload/recorder.h"
#include "offload/sizing.h"
#include "sidestream/call.h"
#include "sidestream/options.h"
#include "sidestream/report.h"

namespace sidestream {

/// A chain that may be captured anew while callables and call sites refer to it.
struct ChainHolder {
  std::shared_ptr<Chain> chain;
};

/// One captured variant of a call: argument values and shapes, and microbatch slot.
struct CallVariant {
  std::shared_ptr<ChainHolder> holder;
  std::size_t layer = 0;
  std::vector<KeptGuard> guards;
  std::vector<std::size_t> shape;
  AutocastState autocast;
};

/// One module or function that `ss::call` was given.
struct CallSite {
  ScopeNode* scope = nullptr;
  std::shared_ptr<const torch::nn::Module> module;
  bool graphed = false;
  std::vector<CallVariant> variants;
};

/// All that one OffloadEngine owns. Handles, nodes and callables share it.
/// Threads: the step's; see the parts for what other threads may call.
class EngineState : public std::enable_shared_from_this<EngineState> {
 public:
  /// `runtime`: null makes that of the options' device.
  EngineState(torch::nn::Module& model, Options options, std::shared_ptr<Runtime> runtime = nullptr);
  EngineState(const EngineState&) = delete;
  EngineState& operator=(const EngineState&) = delete;
  ~EngineState();

  void begin_step();
  /// `failed`: an exception is on its way.
  void end_step(bool failed);
  void dispatch(detail::CallRequest& request, detail::TensorBuffer& outputs);
  [[nodiscard]] Report report() const;
  [[nodiscard]] Journal journal() const { return checked_ != nullptr ? checked_->journal() : Journal(); }
  void reset();

  /// Captures a chain; calls inside its callables are scopes only.
  [[nodiscard]] std::shared_ptr<Chain> capture_chain(std::vector<LayerSpec> specs, const GraphOptions& options);
  /// Counts `holder`'s chain in the report and keeps its static outputs on the device.
  void register_chain(const std::shared_ptr<ChainHolder>& holder);
  /// Captures the layers of `holder`'s chain again, where their parameters lie now.
  void recapture(ChainHolder& holder);
  [[nodiscard]] ScopeTree& tree() noexcept { return tree_; }
  [[nodiscard]] Exclusions& exclusions() noexcept { return exclusions_; }
  [[nodiscard]] Runtime& runtime() noexcept { return *runtime_; }
  [[nodiscard]] const HostArena& arena() const noexcept { return *arena_; }
  [[nodiscard]] const std::vector<std::weak_ptr<ChainHolder>>& chains() const noexcept { return chains_; }
  /// The thread's active engine, or null.
  [[nodiscard]] static EngineState* active() noexcept;

 private:
  [[nodiscard]] GraphResources graph_resources();
  void check_patterns() const;
  void finish_sizing();
  void capture_recorded();
  void follow_relocated_weights();
  void plan_eager();
  /// True for groups of calls that match `graph`: their chains move them.
  [[nodiscard]] bool in_graphed_call(const std::string& group) const;
  void mark_static_outputs();
  /// Where steps are checked: operators of the calling thread go into the journal while the result lives.
  void journal_operators(std::optional<OperatorObserverGuard>& guard);
  [[nodiscard]] CallSite& site_for(const detail::CallRequest& request);
  void learn_names();
  void run_eagerly(CallSite& site, detail::CallRequest& request, detail::TensorBuffer& outputs);
  void record_and_run(CallSite& site, detail::CallRequest& request, detail::TensorBuffer& outputs, std::size_t busy);
  void replay_or_record(CallSite& site, detail::CallRequest& request, detail::TensorBuffer& outputs);
  [[nodiscard]] std::unique_ptr<Recorder> make_recorder(std::shared_ptr<StorageMover> mover,
                                                        const PlannedPass* planned);

  torch::nn::Module& model_;
  Options options_;
  NamePatterns graphed_;
  std::shared_ptr<CheckedRuntime> checked_;  ///< null: nothing is checked
  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<HostArena> arena_;
  ScopeTree tree_;
  Exclusions exclusions_;
  OwnedStream capture_stream_;
  std::shared_ptr<CaptureOffload> capture_offload_;
  std::shared_ptr<EagerOffload> eager_;

  std::unordered_map<const torch::nn::Module*, std::pair<std::string, std::shared_ptr<const torch::nn::Module>>> names_;
  std::deque<CallSite> sites_;
  std::unordered_map<const void*, CallSite*> sites_by_key_;  ///< by module, or by the address of a function's name
  std::vector<std::weak_ptr<ChainHolder>> chains_;           ///< all that use this engine
  std::vector<std::shared_ptr<ChainHolder>> own_chains_;     ///< those that ss::call made

  // The step.
  bool sized_ = false;
  bool in_step_ = false;
  bool capturing_ = false;  ///< bodies run for a capture: calls inside them are scopes only
  bool inside_graphed_call_ = false;
  EngineState* before_ = nullptr;  ///< the thread's active engine before this step
  std::shared_ptr<SizingMover> sizing_;
  std::unique_ptr<Recorder> recorder_;
  std::optional<RecorderGuard> recording_;
  std::optional<OperatorObserverGuard> journaling_;
  RecordedCalls recorded_;
  PlannedPass planned_;
  bool eager_planned_ = false;
  std::int64_t allocated_at_begin_ = 0;

  // The report.
  Profile eager_profile_;
  std::vector<const ScopeNode*> eager_scopes_;
  Plan eager_plan_;
  Report step_;  ///< what the latest whole step and all steps so far add up to
};

}  // namespace sidestream
