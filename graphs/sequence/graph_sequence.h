#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "graphs/outputs/output_storage.h"
#include "graphs/sequence/captured_sequence.h"
#include "graphs/sequence/graph_resources.h"
#include "graphs/sequence/pending_backwards.h"
#include "graphs/sequence/pool_use.h"
#include "graphs/sequence/sequence_copies.h"
#include "offload/eager_offload.h"
#include "runtime/draw_order.h"
#include "runtime/runtime.h"
#include "sidestream/replay_options.h"

namespace sidestream {

/// Replays captured calls, which share one pool of memory, in the order of their captures. Forwards may be left out. Several sequences
/// replay independently of each other.
///
/// graph_sequence.cpp holds forwards and what callers ask, sequence_backward.cpp backwards, sequence_outputs.cpp outputs whose memory is
/// used again, sequence_turns.cpp the turns in shared memory.
///
/// Ordering: Note [Graph choreography] in graph_sequence.cpp.  Capture: illegal.
/// Threads: forwards on one thread at a time; backwards may run on autograd's device threads. Functions that replay or drop graphs
/// lock the memory's mutex; the caller of `give_up_turn` holds it.
class GraphSequence : public std::enable_shared_from_this<GraphSequence> {
 public:
  struct Counts {
    std::uint64_t replays = 0;
    std::uint64_t unused_outputs = 0;
    OutputCounts outputs;
    OutputCounts gradients;  ///< of parameters, in the graphs' own memory

    Counts& operator+=(const Counts& other) noexcept;
  };

  GraphSequence(const GraphResources& resources, CapturedSequence captured);
  GraphSequence(const GraphSequence&) = delete;
  GraphSequence& operator=(const GraphSequence&) = delete;
  ~GraphSequence();

  [[nodiscard]] const CapturedSequence& captured() const noexcept { return captured_; }
  [[nodiscard]] const PendingBackwards& pending() const noexcept { return pending_; }
  /// For the report.
  void note(std::string text) { captured_.plan.notes.push_back(std::move(text)); }

  /// Whether the caller of a forward has asked `accepts`.
  enum class Inputs : std::uint8_t { unknown, accepted };
  /// Replays the forward of `call`. The caller has compared its state (modes, model). `target`: stream and event, or null.
  /// Throws: UsageError (see GraphedCallable); nothing has been queued then.
  void forward(std::size_t call, c10::ArrayRef<at::Tensor> inputs, detail::TensorBuffer& outputs,
               const ReplayOptions* target = nullptr, Inputs known = Inputs::unknown);
  /// True while another sequence in the same memory awaits a backward: no graph of this sequence may be launched.
  [[nodiscard]] bool has_to_wait() const { return captured_.memory->pending_beside(this); }
  /// For GraphMemory: another sequence takes the turn. The current stream waits for all uses of the memory; outputs that are still held are
  /// copied out.
  void give_up_turn();
  /// True if a forward of `call` begins a pass: no call awaits its backward. Forwards alone await none; there a pass begins with a call
  /// that is not after the call before it.
  [[nodiscard]] bool begins_pass(std::size_t call) const;
  /// Drops the graphs of one call, or of all. The memory of the graphs is freed with the last one. Idempotent.
  void reset(std::size_t call);
  void reset();
  /// Drops the graphs of one call, and frees what it has and no other call reads. Idempotent.
  void release(std::size_t call);
  /// The current stream waits for all copies that replays have queued.
  void join_copies();

  [[nodiscard]] Counts take_counts();
  /// Which stream launches a graph of call `index`, for people.
  [[nodiscard]] std::string stream_in_words(std::size_t index, bool backward) const;

 private:
  friend class ReplayNode;

  /// The current stream waits for the stream that the latest graph was called on: that stream is after the graph and its readers.
  void follow_latest_call();
  /// Before the launch of a forward: this sequence has the turn from here on. Throws: UsageError if another awaits a backward.
  void take_turn(std::size_t index);
  /// After the graphs were dropped: blocks the host until no tensor that this sequence gave out is read in its memory.
  void leave_memory() noexcept;
  void write_static_inputs(CapturedCall& call, c10::ArrayRef<at::Tensor> inputs);
  /// Before the launch of the graph at `graph_index`: handles outputs that later forwards gave out in an earlier pass.
  void overwrite_later_outputs(std::size_t graph_index);
  /// Before the launch of the graph at `graph_index`: handles outputs of earlier calls whose memory that graph uses again.
  void overwrite_released_outputs(std::size_t graph_index);
  /// Before the same launch: handles gradients in the graphs' own memory that this graph or a later one gave out. This graph may use
  /// their memory.
  void overwrite_given_gradients(std::size_t graph_index);
  /// No graph of this sequence is launched again. Held outputs in memory that other sequences may use get memory of their own. When this
  /// returns, no stream reads outputs that are not held.
  void part_with_outputs() noexcept;
  /// The same for one output, without the wait. If there is no room, it stays in shared memory, or keeps this sequence's own memory.
  void part_with(OutputStorage& storage, OutputCounts& counts) noexcept;
  void attach_node(std::size_t index, c10::ArrayRef<at::Tensor> inputs, detail::TensorBuffer& outputs);
  /// Replays the backward of `call`; `grads` become the gradients of inputs, then of parameters.
  void backward(std::size_t index, std::uint64_t generation, std::vector<at::Tensor>& grads);
  /// Throws: UsageError; nothing has been queued then.
  void check_backward(std::size_t index, std::uint64_t generation);
  /// Throws: UsageError if the backward graph would read or do something else than at its capture.
  void check_backward_state(std::size_t index) const;
  void launch_backward(std::size_t index);
  void write_static_grads(CapturedCall& call, const std::vector<at::Tensor>& grads);
  /// The backward of `call` has run, or will not run. Finds which backward is due next.
  void settle_pending(std::size_t index) noexcept;
  /// After a failure that followed a launch: waits until nothing that was queued on `side` runs any more.
  void settle(c10::Stream side) noexcept;
  void drop_pending(std::size_t index, std::uint64_t generation) noexcept;
  [[nodiscard]] c10::Stream forward_stream(std::size_t index) const { return streams_[index % streams_.size()]; }
  [[nodiscard]] c10::Stream backward_stream() const { return streams_[0]; }
  /// `event`: the caller's of this call, or null.
  void launch(const Graph& graph, c10::Stream side, const ExternalEvent& done, const GraphEvent* event);
  /// Waits for what runs on any stream that graphs replay on.
  void synchronize_streams();
  /// Held outputs of `call` get memory of their own, and the call's memory for outputs is freed. If there is no room, they stay.
  void give_up_outputs(std::size_t index) noexcept;
  void take_target(CapturedCall& call, const ReplayOptions* target);

  std::shared_ptr<Runtime> runtime_;
  DrawOrder& draw_order_;
  std::vector<OwnedStream> side_streams_;
  std::vector<c10::Stream> streams_;
  std::vector<c10::Stream> given_streams_;  ///< of ReplayOptions, each once
  Event fork_;
  Event whole_stream_;
  CapturedSequence captured_;
  std::recursive_mutex& mutex_;           ///< the memory's
  std::optional<c10::Stream> called_on_;  ///< the latest launch
  std::int64_t latest_ = -1;              ///< the call whose forward was launched last
  PendingBackwards pending_;
  std::vector<std::size_t> gave_gradients_;  ///< calls that gave out gradients in their memory since, the highest first
  std::size_t highest_given_ = 0;  ///< no call above it has given out outputs since a forward below was launched
  std::shared_ptr<EagerOffload> eager_;
  SequenceCopies copies_;
  PoolUse use_;
  Counts counts_;
};

}  // namespace sidestream
