#pragma once
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "graphs/calls/call_site.h"
#include "graphs/calls/engine_counts.h"
#include "graphs/sequence/graph_sequence.h"
#include "sidestream/graph_options.h"

namespace sidestream {

class CallContext;
class CallTable;
class EagerPlan;
struct EngineResources;
class RecordedCalls;

/// All sequences of one engine. It captures them, captures them again if weights were relocated, and keeps the memory of their outputs on
/// the device. Threads: the step's.
class EngineSequences {
 public:
  /// All must outlive this object.
  EngineSequences(EngineResources& resources, CallContext& context, EagerPlan& plan, EngineCounts& counts)
      : resources_(resources), context_(context), plan_(plan), counts_(counts) {}
  EngineSequences(const EngineSequences&) = delete;
  EngineSequences& operator=(const EngineSequences&) = delete;
  ~EngineSequences() = default;

  /// Captures a sequence that fits the device (capture_that_fits), in `memory` if it is given. Calls inside of its callables are scopes
  /// only. While the holder exists, the report counts the sequence, and its static outputs stay on the device.
  /// Throws: as make_graphed_callables.
  [[nodiscard]] std::shared_ptr<SequenceHolder> capture(const std::vector<CallSpec>& specs, SequenceOrder order,
                                                        const GraphOptions& options,
                                                        const std::shared_ptr<GraphMemory>& memory = {});
  /// Captures the calls of `holder`'s sequence again, where their parameters lie now.
  /// Throws: UsageError if that is not possible now, and the sequence is unchanged; as `capture`, and the sequence's graphs are gone.
  void recapture(SequenceHolder& holder);

  /// Captures what `ss::call` recorded, and gives the calls their variants: the calls in the order of the step as one sequence, all others
  /// as one sequence for each microbatch slot. If a capture fails, those before it stay and the rest is tried again.
  void capture_recorded(RecordedCalls& recorded);
  /// Whether to capture now. `mine`: there is something to capture. Not while a backward that is to come needs the shared memory
  /// of a capture, and not if GraphOptions::agree_to_capture says no.
  [[nodiscard]] bool agree(bool mine);
  /// If there is something to capture, but not now: why the calls run eagerly in this step.
  [[nodiscard]] std::optional<EagerCause> postponed() const noexcept { return postponed_; }
  /// True when a sequence of `ss::call` must be captured again.
  [[nodiscard]] bool outdated() const;
  /// If weights were relocated, the sequences of `ss::call` that read them are captured again. If weights were replaced, these sequences
  /// are dropped, and `calls` records their calls anew. GraphOptions::on_relocated_weights can make both an error.
  void follow_weights(CallTable& calls);
  /// Captures the calls of all sequences of `ss::call` again. Throws: as `recapture`.
  void recapture_calls();
  /// Drops the graphs of all sequences of `ss::call`. They are outdated then.
  void reset_calls();
  /// Of `ss::call`, in a fixed order.
  [[nodiscard]] std::vector<const GraphSequence*> of_calls() const;
  /// If a call would get more captures than its bound, its least recently used ones are dropped, unless a backward is pending. Captures
  /// of other calls stay.
  void drop_least_used(CallTable& calls, const RecordedCalls& recorded);
  /// After a step that failed. Until autograd's thread has freed the nodes of a backward that threw, the nodes' calls look like a
  /// microbatch in flight. Waits until the last node is freed, for at most PendingBackwards::kEndOfFailed.
  void await_failed_backward() const;
  /// Drops the graphs of all sequences that `ss::call` made.
  void drop_own();
  /// Offload was switched: callables and whole steps capture again before their next pass.
  void offload_switched() const;
  /// Only what graphs own now is kept on the device for them.
  void mark_static_outputs();

  [[nodiscard]] const SequenceHolders& all() const noexcept { return all_; }
  template <class Visit>
  void for_each(const Visit& visit) const {
    for_each_sequence(all_, visit);
  }

 private:
  /// Throws: UsageError if nothing may be captured now.
  void check_capture(const GraphOptions& options) const;
  /// True if a capture would be made in memory that a backward to come needs.
  [[nodiscard]] bool needs_memory_in_use() const;
  /// Throws: as `capture`.
  [[nodiscard]] std::shared_ptr<GraphSequence> capture_sequence(const std::vector<CallSpec>& specs, SequenceOrder order,
                                                                const GraphOptions& options,
                                                                const std::shared_ptr<GraphMemory>& memory);
  /// What the captures of a slot are to share with others; null for memory of their own.
  [[nodiscard]] std::shared_ptr<GraphMemory> memory_of(const std::vector<const CallSite*>& sites, std::size_t slot,
                                                       bool evaluation);
  void capture_group(RecordedCalls& recorded, const std::vector<std::size_t>& group, SequenceOrder order,
                     std::size_t slot, bool evaluation);

  EngineResources& resources_;
  CallContext& context_;
  EagerPlan& plan_;
  EngineCounts& counts_;
  SequenceHolders all_;
  std::optional<EagerCause> postponed_;
  std::vector<std::shared_ptr<SequenceHolder>> own_;  ///< those that ss::call made
  /// By call and slot, if captures share memory: CallOptions::share_memory, or forward graphs with the first slot. Calls of one sequence
  /// have the same.
  std::map<std::pair<const CallSite*, std::size_t>, std::shared_ptr<GraphMemory>> memories_;
};

}  // namespace sidestream
