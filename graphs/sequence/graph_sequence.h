#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include "analysis/sequence_order.h"
#include "graphs/sequence/captured_sequence.h"
#include "graphs/sequence/graph_memory.h"
#include "graphs/sequence/graph_resources.h"
#include "graphs/sequence/pool_use.h"
#include "graphs/sequence/sequence_copies.h"
#include "graphs/sequence/sequence_outputs.h"
#include "graphs/sequence/sequence_streams.h"
#include "offload/step_trace.h"
#include "runtime/runtime.h"
#include "sidestream/replay_options.h"

namespace sidestream {

struct LeafGradients;

/// The calls of a sequence that await their backward, or the gradients of delayed parameters after it: what they saved lies in the
/// sequence's memory.
/// Threads: `ready`, `any` and `await_none` lock the memory's mutex. The caller of the other functions holds it.
class PendingBackwards {
 public:
  /// Both must outlive this object.
  PendingBackwards(const SequenceOrder& order, GraphMemory& memory)
      : order_(order), memory_(memory), runs_(order), weights_(PendingRuns::of_weights(order)) {}

  /// True if `call` may replay its forward now: it overwrites nothing that a pending call needs.
  [[nodiscard]] bool ready(std::size_t call) const {
    const std::lock_guard lock(memory_.mutex());
    const std::size_t graph_index = order_.forward_index(call);
    return !weights_.obstacle(graph_index) && !runs_.obstacle(graph_index);
  }
  [[nodiscard]] bool any() const {
    const std::lock_guard lock(memory_.mutex());
    return any_run();
  }
  /// As any(). The caller holds the mutex.
  [[nodiscard]] bool any_run() const noexcept { return !weights_.empty() || !runs_.empty(); }
  /// True if `holds` is true of any of these calls. Looks at all calls.
  template <class Holds>
  [[nodiscard]] bool any_of(const Holds& holds) const {
    const std::lock_guard lock(memory_.mutex());
    bool found = false;
    for (std::size_t call = 0; call < order_.runs() && !found; ++call) {
      found = (runs_.contains(call) || weights_.contains(call)) && holds(call);
    }
    return found;
  }
  /// How long to wait for the end of a backward that has failed: autograd's thread frees its nodes shortly after the caller got the
  /// exception, but keeps them if the caller holds the graph.
  static constexpr std::chrono::milliseconds kEndOfFailed{200};
  /// Blocks the host until no call awaits its backward, or until `bound`. The caller does not hold the mutex.
  void await_none(std::chrono::steady_clock::time_point bound) const {
    std::unique_lock lock(memory_.mutex());
    (void)memory_.settled().wait_until(lock, bound, [this] { return runs_.empty(); });
  }

  /// Blocks the host until no delayed gradients forbid a launch of the graph, at most for kEndOfFailed. `lock`: of the mutex.
  void await_weights(std::size_t graph_index, std::unique_lock<std::recursive_mutex>& lock) const {
    (void)memory_.settled().wait_for(lock, kEndOfFailed, [&] { return !weights_.obstacle(graph_index); });
  }

  /// The calls that await their backward.
  [[nodiscard]] const PendingRuns& runs() const noexcept { return runs_; }
  /// The calls whose backward has left gradients of delayed parameters to be computed.
  [[nodiscard]] const PendingRuns& weights() const noexcept { return weights_; }
  /// The forward of `call` was launched.
  void begin(std::size_t call) { runs_.begin(call); }
  /// The backward of `call` was launched, or will not come.
  void end(std::size_t call) noexcept {
    runs_.end(call);
    if (runs_.empty()) {
      memory_.settled().notify_all();
    }
  }
  /// The backward of `call` has left gradients of delayed parameters to be computed.
  void weights_delayed(std::size_t call) { weights_.begin(call); }
  /// They were computed, or will not be.
  void weights_computed(std::size_t call) noexcept {
    weights_.end(call);
    memory_.settled().notify_all();
  }

 private:
  const SequenceOrder& order_;
  GraphMemory& memory_;
  PendingRuns runs_;
  PendingRuns weights_;
};

/// Replays captured calls, which share one pool of memory, in the order of their captures. Forwards may be left out. Several sequences
/// replay independently of each other.
///
/// graph_sequence.cpp holds forwards and the end of calls, sequence_backward.cpp backwards, sequence_weights.cpp
/// delayed weight gradients, sequence_turns.cpp turns in shared memory.
///
/// Ordering: Note [Graph choreography] in graph_sequence.cpp.  Capture: illegal.
/// Threads: forwards on one thread at a time; backwards may run on autograd's device threads. Functions that replay or drop graphs
/// lock the memory's mutex; the caller of `release_turn` holds it.
class GraphSequence : public std::enable_shared_from_this<GraphSequence> {
 public:
  struct Counts {
    std::uint64_t replays = 0;
    std::uint64_t unused_outputs = 0;
    OutputStorage::Counts outputs;
    OutputStorage::Counts gradients;  ///< of parameters, in the graphs' own memory

    Counts& operator+=(const Counts& other) noexcept;
  };
  /// Whether the caller of a forward has asked CapturedSequence::accepts.
  enum class Inputs : std::uint8_t { unknown, accepted };

  GraphSequence(const GraphResources& resources, CapturedSequence captured);
  GraphSequence(const GraphSequence&) = delete;
  GraphSequence& operator=(const GraphSequence&) = delete;
  ~GraphSequence();

  [[nodiscard]] const CapturedSequence& captured() const noexcept { return captured_; }
  [[nodiscard]] const SequenceStreams& streams() const noexcept { return streams_; }
  [[nodiscard]] const PendingBackwards& pending() const noexcept { return pending_; }
  /// True while another sequence in the same memory awaits a backward: no graph of this sequence may be launched.
  [[nodiscard]] bool has_to_wait() const { return captured_.memory->pending_beside(this); }
  /// True if a forward of `call` begins a pass: no call awaits its backward. Forwards alone await none; there a pass begins with a call
  /// that is not after the call before it.
  [[nodiscard]] bool begins_pass(std::size_t call) const;

  /// True if the backward of the forward `generation` of `call` is to come.
  [[nodiscard]] bool awaits_backward(std::size_t call, std::uint64_t generation) const;

  /// The call whose backward ran last. Not set if a forward was launched since.
  [[nodiscard]] std::optional<std::size_t> latest_backward() const {
    const std::lock_guard lock(mutex_);
    return latest_backward_;
  }

  /// Replays the forward of `call`. The caller has compared its state (modes, model). `target`: stream and event, or null.
  /// Throws: UsageError (see GraphedCallable); nothing has been queued then.
  void forward(std::size_t call, c10::ArrayRef<at::Tensor> inputs, detail::TensorBuffer& outputs,
               const ReplayOptions* target = nullptr, Inputs known = Inputs::unknown);
  /// The forward of `call` that was just replayed is one of that chunk; 0: of none. `id`: see CapturedCall::Replay.
  void set_chunk(std::size_t call, std::uint64_t chunk, const std::optional<ChunkId>& id) {
    const std::lock_guard lock(mutex_);
    captured_.calls[call].replay.chunk = chunk;
    captured_.calls[call].replay.chunk_id = id;
  }
  /// `call` was called, and ran eagerly.
  void ran_eagerly(std::size_t call) {
    const std::lock_guard lock(mutex_);
    captured_.calls[call].replay.ran_eagerly = true;
  }
  /// Replays the backward of `call` for its forward `generation`; `grads` become the gradients of inputs, then of parameters.
  /// Throws: UsageError; nothing has been queued then.
  void backward(std::size_t call, std::uint64_t generation, std::vector<at::Tensor>& grads);
  /// In a backward(): who called it waits, at its end, for what graphs of it add into `.grad`.
  void let_caller_wait();
  /// Computes the gradients of the delayed parameters of `call`, which are not delayed any more: see Note [Delayed weight gradients] in
  /// weights_capture.cpp. Throws: as replay_weights.
  [[nodiscard]] LeafGradients take_weights(std::size_t call);
  /// Runs `work` on the stream of the backward that delayed the weight gradients of `call`. As in a backward(), that stream waits for the
  /// caller's, and the caller's for it: gradients are memory of the forward's stream, whoever asks for them.
  void run_where_delayed(std::size_t call, c10::function_ref<void()> work);
  /// May be repeated until take_weights. Returns copies; undefined if no output that leads there got a gradient.
  /// Throws: UsageError; nothing has been queued then.
  [[nodiscard]] std::vector<at::Tensor> replay_weights(std::size_t call);
  /// They are computed, or will not be: the call may replay again.
  void settle_weights(std::size_t call) noexcept;
  /// No backward will come for the forward `generation` of `call`.
  void drop_pending(std::size_t call, std::uint64_t generation) noexcept;
  /// The current stream waits for all copies that replays have queued.
  void join_copies();
  /// For GraphMemory: another sequence takes the turn. The current stream waits for all uses of the memory; outputs that are still held are
  /// copied out.
  void release_turn();

  /// Drops the graphs of all calls, and frees their memory. Idempotent.
  void reset();
  /// Drops the graphs of one call, and frees what it has and no other call reads. Idempotent.
  void release(std::size_t call);

  /// For the report.
  void note(std::string text) { captured_.plan.notes.push_back(std::move(text)); }
  [[nodiscard]] Counts take_counts();

 private:
  /// Before the launch of a forward: this sequence has the turn from here on. Throws: UsageError if another awaits a backward.
  void take_turn(std::size_t call);
  using Drawing = std::unique_lock<std::mutex>;  ///< what SequenceStreams::lock_to_launch returned for the graph
  void launch_forward(std::size_t call, const ReplayOptions* target, const Drawing& drawing);
  void launch_backward(std::size_t call, const Drawing& drawing);
  [[nodiscard]] std::vector<at::Tensor> launch_weights(std::size_t call, const Drawing& drawing);
  /// Before the launch of a backward with this graph index, which check_order_of_backward allows: calls that await theirs and would have
  /// to run it first will have none.
  void give_up_later_calls(std::size_t graph_index) noexcept;
  /// The backward of `call` has run, or will not run. Finds which backward is due next.
  void settle_pending(std::size_t call) noexcept;
  /// If delayed gradients of a backward() that failed forbid a launch of the graph: blocks the host until they are dropped, at most for
  /// PendingBackwards::kEndOfFailed. `lock`: of the mutex.
  void await_failed_weights(std::size_t graph_index, std::unique_lock<std::recursive_mutex>& lock) const;
  /// After the backward of `call` was launched.
  /// Throws: UsageError if a backward would delay weight gradients that nobody can ask for any more.
  void refuse_lost_weights(std::size_t call) const;
  void delay_weights(std::size_t call, OutputSet used);
  /// Notes that no replay uses the pool, if no backward is pending.
  void settle_idle() noexcept;
  void drop_graphs(std::size_t call);
  /// After the graphs were dropped: blocks the host until no tensor that this sequence gave out is read in its memory.
  void release_memory() noexcept;

  std::shared_ptr<Runtime> runtime_;
  SequenceStreams streams_;
  CapturedSequence captured_;
  std::recursive_mutex& mutex_;  ///< the memory's
  PendingBackwards pending_;
  SequenceOutputs outputs_;
  SequenceCopies copies_;
  PoolUse use_;
  std::optional<PoolUse> weights_use_;  ///< if gradients are delayed
  std::shared_ptr<DelayedWeights> delayed_weights_;
  std::int64_t latest_ = -1;                    ///< the call whose forward was launched last
  std::optional<std::size_t> latest_backward_;  ///< see latest_backward
  std::uint64_t unused_outputs_ = 0;
  int backward_with_waiting_caller_ = -1;  ///< autograd's number of the latest one (let_caller_wait)
};

}  // namespace sidestream
