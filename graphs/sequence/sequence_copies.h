#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <c10/core/Stream.h>

#include "analysis/sequence_order.h"
#include "graphs/sequence/captured_call.h"
#include "offload/group_mover.h"
#include "runtime/runtime.h"

namespace sidestream {

/// Queues the copies of a sequence's replays beside its graphs. Makes each graph wait for the copies whose memory it uses.
///
/// Ordering: Note [Graph choreography] in graph_sequence.cpp.  Capture: illegal.  Threads: one at a time (the sequence's mutex).
/// If a function throws, the copies that it had queued are done.
class SequenceCopies {
 public:
  /// `calls`, their `order` and those that are `pending`, or whose `weights` are, must outlive this object.
  SequenceCopies(std::shared_ptr<Runtime> runtime, std::shared_ptr<GroupMover> mover, CapturedCalls& calls,
                 const SequenceOrder& order, const PendingRuns& pending, const PendingRuns& weights);
  SequenceCopies(const SequenceCopies&) = delete;
  SequenceCopies& operator=(const SequenceCopies&) = delete;
  /// Blocks the host until the copies are done.
  ~SequenceCopies();

  /// Of the engine's steps.
  [[nodiscard]] StepTrace& trace() const noexcept { return mover_->trace(); }
  /// Queues the reloads that are due before the forward of call `index`. Makes `side` wait for all work that must come before it.
  void before_forward(std::size_t index, c10::Stream side);
  /// After the launch of that forward: queues its copies to the host.
  void forward_launched(std::size_t index);
  /// Queues the reloads that are due before the backward of call `index`. Makes `side` wait for all work that must come before it.
  void before_backward(std::size_t index, c10::Stream side);
  /// After the launch of that backward.
  void backward_launched(std::size_t index);
  /// The same for the weights graph of call `index`. Queues also the reload for the next one that is pending.
  void before_weights(std::size_t index, c10::Stream side);
  /// Bytes of the targets of the reload for a weights graph that was queued, while the graph has not been launched.
  [[nodiscard]] std::int64_t for_weights_bytes() const {
    return for_weights_ ? static_cast<std::int64_t>(calls_[*for_weights_].copies.captured.for_weights) : 0;
  }
  /// Before the launch of the graph at `graph_index`: makes `stream`, which writes memory of that graph, wait for the copies that the graph
  /// has to wait for.
  void await_others(std::size_t graph_index, c10::Stream stream);
  /// Makes `stream` wait for all copies that no graph has waited for.
  void join(c10::Stream stream);
  /// Blocks the host until the copies of call `index` are done, and forgets them.
  void reset(std::size_t index);

 private:
  /// A call whose reload was queued since the latest forward, while no graph has used its memory.
  struct Reload {
    std::size_t call = 0;
    bool awaited = false;  ///< by a graph
  };

  /// True if the graph at `graph_index` may use the memory that call `index` was offloaded from. So it may if it begins another pass.
  [[nodiscard]] bool may_use_sources(std::size_t graph_index, std::size_t index) const;
  /// True if the graph at `graph_index` may use the memory that the copies of call `index` are reloaded to.
  [[nodiscard]] bool may_use_targets(std::size_t graph_index, std::size_t index) const;
  [[nodiscard]] bool is_on_device(std::size_t index) const;
  /// After that launch: forgets the copies that no later graph of the pass has to wait for.
  void forget_awaited(std::size_t graph_index);
  /// Runs once after the captures and once after each reset, so that no graph looks at calls that have nothing to reload.
  void find_calls_with_copies();
  /// Queues the reloads that are due before the graph at `graph_index`, and notes their calls in `due_`.
  void queue_due_reloads(std::size_t graph_index, c10::Stream side);

  /// Queues the reload for the weights graph of call `index`.
  void queue_for_weights(std::size_t index, c10::Stream side);
  /// Makes `side` wait for the reload for a weights graph that was queued, and forgets it.
  void await_for_weights(c10::Stream side);

  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<GroupMover> mover_;
  CapturedCalls& calls_;
  const SequenceOrder& order_;
  const PendingRuns& pending_;
  const PendingRuns& weights_;
  std::vector<std::size_t> offloading_;  ///< calls whose copies to the host no graph has waited for
  std::vector<Reload> reloading_;
  std::vector<std::size_t> due_;
  std::vector<std::size_t> with_copies_;  ///< in the order of their backwards
  std::vector<bool> reload_before_;       ///< by graph index: a forward before which reloads are due
  std::vector<std::optional<std::size_t>>
      next_for_weights_;  ///< by rank of weights graphs: the call to reload for before that one
  bool found_ = false;    ///< all three are up to date
  std::optional<std::size_t>
      for_weights_;  ///< the call whose reload for its weights graph was queued and not waited for
  Event for_weights_reloaded_;
};

}  // namespace sidestream
