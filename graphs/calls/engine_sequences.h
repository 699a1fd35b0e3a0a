#pragma once
#include <cstddef>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "graphs/sequence/graph_sequence.h"
#include "sidestream/graph_options.h"

namespace sidestream {

class CallContext;
class CallSet;
struct CallSite;
class CallTable;
class EagerPlan;
struct EngineResources;
class RecordedCalls;
class EngineCounts;

/// A sequence that may be captured anew while callables and call sites refer to it.
struct SequenceHolder {
  std::shared_ptr<GraphSequence> sequence;
  /// Of the calls that it was first captured with, by their order then: where each is now. Empty while none was left out by a
  /// capture in its place.
  std::vector<std::size_t> indices = {};

  [[nodiscard]] std::size_t index_of(std::size_t call) const { return indices.empty() ? call : indices[call]; }
};

/// All sequences of one engine: captures them, captures them again where weights were relocated, and keeps what their graphs own
/// on the device. Threads: the step's.
class EngineSequences {
 public:
  /// All must outlive this object.
  EngineSequences(EngineResources& resources, CallContext& context, EagerPlan& plan, EngineCounts& counts)
      : resources_(resources), context_(context), plan_(plan), counts_(counts) {}
  EngineSequences(const EngineSequences&) = delete;
  EngineSequences& operator=(const EngineSequences&) = delete;
  ~EngineSequences() = default;

  /// Captures a sequence that fits the device (capture_that_fits), in `memory` where it is given; calls inside its callables are scopes only. It counts once a holder
  /// of it is added. Throws: as make_graphed_callables.
  [[nodiscard]] std::shared_ptr<GraphSequence> capture(const std::vector<CallSpec>& specs, const GraphOptions& options,
                                                       std::shared_ptr<GraphMemory> memory = {});
  /// Counts `holder`'s sequence in the report and keeps its static outputs on the device, for as long as someone has it.
  void add(const std::shared_ptr<SequenceHolder>& holder);
  /// Captures the calls of `holder`'s sequence again, where their parameters lie now.
  /// Throws: UsageError where that may not be now, and the sequence is as it was; as `capture`, and the sequence's graphs are gone.
  void recapture(SequenceHolder& holder);

  /// Captures what `ss::call` recorded, one sequence for each microbatch slot, and gives the calls their variants. Where a slot's
  /// capture fails, the slots before it stay and the rest is tried again.
  void capture_recorded(RecordedCalls& recorded);
  /// Captures the pass that `set` has recorded: a bucket more. The least recently used bucket makes room if the bound demands it.
  /// Does nothing if not all ranks agree. Throws: as `capture`; the pass is forgotten then.
  void capture_pass(CallSet& set);
  /// Captures a bucket of `set`. Throws: as `capture`.
  void add_bucket(CallSet& set, const std::vector<CallSpec>& specs);
  /// Whether to capture now: asks GraphOptions::agree_to_capture of the engine, where it is given. `mine`: there is something to
  /// capture.
  [[nodiscard]] bool agree(bool mine);
  /// True where this rank has something to capture that not all ranks have: its calls run eagerly in this step.
  [[nodiscard]] bool postponed() const noexcept { return postponed_; }
  /// True when a sequence of `ss::call` must be captured again.
  [[nodiscard]] bool outdated() const;
  /// Sequences of `ss::call` whose weights were relocated are captured again; those whose weights are others are dropped, and
  /// `calls` records anew what ran in them. Or it is an error by option.
  void follow_weights(CallTable& calls);
  /// Calls of which `recorded` would make more captures than there may be lose those that were used least recently, but for those
  /// with a backward to come. What other calls captured beside them stays.
  void drop_least_used(CallTable& calls, const RecordedCalls& recorded);
  /// After a step that failed. Autograd's thread frees the nodes of a backward that threw shortly after the caller got the exception.
  /// Until then the nodes' calls look like a microbatch in flight. Waits until the last node is freed, for at most 200 ms: a caller
  /// may hold the graph.
  void await_failed_backward() const;
  /// Drops the graphs of all sequences that `ss::call` made.
  void drop_own();
  /// Only what graphs own now is kept on the device for them.
  void mark_static_outputs();

  [[nodiscard]] const std::vector<std::weak_ptr<SequenceHolder>>& all() const noexcept { return all_; }
  template <class Visit>
  void for_each(const Visit& visit) const {
    for (const auto& weak : all_) {
      if (const auto holder = weak.lock(); holder != nullptr && holder->sequence != nullptr) {
        visit(*holder->sequence);
      }
    }
  }

 private:
  /// Throws: UsageError where nothing may be captured now.
  void check_capture(const GraphOptions& options) const;
  /// What the captures of a slot are to share with others; null for memory of their own.
  [[nodiscard]] std::shared_ptr<GraphMemory> memory_of(const std::vector<const CallSite*>& sites, std::size_t slot,
                                                       bool evaluation);
  void capture_group(RecordedCalls& recorded, const std::vector<std::size_t>& group, std::size_t slot, bool evaluation);

  EngineResources& resources_;
  CallContext& context_;
  EagerPlan& plan_;
  EngineCounts& counts_;
  std::vector<std::weak_ptr<SequenceHolder>> all_;
  bool postponed_ = false;
  std::vector<std::shared_ptr<SequenceHolder>> own_;  ///< those that ss::call made
  /// By call and slot, if captures share memory: CallOptions::share_memory, or forward graphs with the first slot. Calls of one sequence
  /// have the same.
  std::map<std::pair<const CallSite*, std::size_t>, std::shared_ptr<GraphMemory>> memories_;
};

}  // namespace sidestream
