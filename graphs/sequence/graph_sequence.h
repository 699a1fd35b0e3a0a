#pragma once
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "analysis/planner.h"
#include "analysis/sequence_order.h"
#include "graphs/outputs/released_outputs.h"
#include "graphs/sequence/captured_call.h"
#include "graphs/sequence/graph_memory.h"
#include "graphs/sequence/graph_resources.h"
#include "graphs/sequence/pool_use.h"
#include "graphs/sequence/sequence_copies.h"
#include "memory/host_arena.h"
#include "offload/eager_offload.h"
#include "runtime/draw_order.h"
#include "runtime/runtime.h"
#include "sidestream/graph_options.h"

namespace sidestream {

/// Device memory that a sequence took outside of LibTorch's allocator, in bytes: by how much the use of the device grew. It includes
/// memory that other processes took in that time.
struct OutsideBytes {
  std::int64_t warm_up = 0;  ///< loaded kernels and libraries, and their handles: eager passes take it as well
  std::int64_t graphs = 0;   ///< executables of graphs, and what libraries took in captures
};

/// Calls that are captured together, share one memory pool, and replay in the order of their captures: forwards 0..n, backwards n..0.
/// Forwards may be left out. Several sequences replay independently of each other.
///
/// graph_sequence.cpp holds forwards and what callers ask, sequence_backward.cpp backwards, sequence_outputs.cpp outputs whose memory is
/// used again, sequence_turns.cpp the turns in shared memory, sequence_inputs.cpp the check of inputs.
///
/// Ordering: Note [Graph choreography] in graph_sequence.cpp.  Capture: illegal.
/// Threads: forwards on one thread at a time; backwards may run on autograd's device threads.
class GraphSequence : public std::enable_shared_from_this<GraphSequence> {
 public:
  struct Counts {
    std::uint64_t replays = 0;
    std::uint64_t unused_outputs = 0;
    OutputCounts outputs;
    OutputCounts gradients;  ///< of parameters, in the graphs' own memory

    Counts& operator+=(const Counts& other) noexcept;
  };

  ~GraphSequence();

  /// True if `inputs` are what `call` was captured with, except for their addresses.
  [[nodiscard]] bool accepts(std::size_t call, c10::ArrayRef<at::Tensor> inputs) const;
  /// Throws: UsageError that says which input differs, and how.
  void check(std::size_t call, c10::ArrayRef<at::Tensor> inputs) const;
  /// Whether the caller of a forward has asked `accepts`.
  enum class Inputs : std::uint8_t { unknown, accepted };
  /// Replays the forward of `call`. The caller has compared its state (modes, model). `target`: stream and event, or null.
  /// Throws: UsageError (see GraphedCallable); nothing has been queued then.
  void forward(std::size_t call, c10::ArrayRef<at::Tensor> inputs, detail::TensorBuffer& outputs,
               const ReplayOptions* target = nullptr, Inputs known = Inputs::unknown);
  /// True while a forward of `call` awaits its backward.
  [[nodiscard]] bool pending(std::size_t call) const;
  /// True if `call` may replay its forward now: neither it nor a later call awaits its backward.
  [[nodiscard]] bool ready(std::size_t call) const;
  [[nodiscard]] bool any_pending() const;
  /// Blocks the host until no call awaits its backward, or until `bound`. Threads: the caller does not hold the memory's mutex.
  void await_backwards(std::chrono::steady_clock::time_point bound) const;
  /// True while another sequence in the same memory awaits a backward: no graph of this sequence may be launched.
  [[nodiscard]] bool has_to_wait() const;
  /// Before a capture in its memory. Throws: UsageError if another sequence there awaits a backward.
  void check_turn() const;
  /// Throws: UsageError that names the call whose backward is pending; `what`: the call that would be replayed.
  [[noreturn]] void refuse_turn(const std::string& what) const;
  [[nodiscard]] const std::shared_ptr<GraphMemory>& memory() const noexcept { return memory_; }
  /// True for captures of forwards alone, made under no_grad.
  [[nodiscard]] bool forwards_alone() const { return !calls_.front().spec.state.modes.gradients; }
  /// How the model differs from what the graphs of `call`, or of any call, have frozen.
  [[nodiscard]] FactsChange change(std::size_t call) const noexcept;
  [[nodiscard]] FactsChange change() const noexcept;
  /// Of `call`, with all modules that a plain function may reach. For callers that look at no other time. See ModuleFacts::attend_to.
  [[nodiscard]] FactsChange change_of_all(std::size_t call) const noexcept;
  /// The same in words, for an error. Allocates.
  [[nodiscard]] std::string difference(std::size_t call) const;
  /// Changes for which the calls must be captured again before a pass: weights that were frozen, unfrozen, replaced or relocated. Not
  /// among them are changes with which a call runs eagerly (modes, options) or is refused (dtype, shape). Weights that capture-time hooks
  /// place may be elsewhere: the hooks' owner may not have placed them yet.
  [[nodiscard]] FactsChange change_before_pass() const noexcept;
  /// True if a forward of `call` begins a pass: no call awaits its backward. Forwards alone await none; there a pass begins with a call
  /// that is not after the call before it.
  [[nodiscard]] bool begins_pass(std::size_t call) const;
  /// Drops the graphs of one call, or of all. The memory of the graphs is freed with the last one. Idempotent.
  void reset(std::size_t call);
  void reset();
  /// Drops the graphs of one call, and frees what it has and no other call reads. Idempotent.
  void release(std::size_t call);
  /// True if all calls were released.
  [[nodiscard]] bool released() const;
  /// The current stream waits for all copies that replays have queued.
  void join_copies();

  [[nodiscard]] const CapturedCalls& calls() const noexcept { return calls_; }
  [[nodiscard]] const Plan& plan() const noexcept { return plan_; }
  [[nodiscard]] const Profile& profile() const noexcept { return profile_; }
  [[nodiscard]] const GraphOptions& options() const noexcept { return options_; }
  [[nodiscard]] Counts take_counts();
  [[nodiscard]] const OutsideBytes& outside() const noexcept { return outside_; }
  /// Which stream launches a graph of call `index`, for people.
  [[nodiscard]] std::string stream_in_words(std::size_t index, bool backward) const;
  /// For the report.
  void note(std::string text) { plan_.notes.push_back(std::move(text)); }

 private:
  friend class ReplayNode;
  friend class SequenceCapture;
  GraphSequence(const GraphResources& resources, const GraphOptions& options, SequenceOrder order);

  /// True if `input` is another call's output. It must be passed as long as that call makes it.
  [[nodiscard]] bool is_linked(const StaticInput& input) const {
    return input.from && !calls_[input.from->call].replay.released;
  }

  /// The current stream waits for the stream that the latest graph was called on: that stream is after the graph and its readers.
  void follow_latest_call();
  /// Before the launch of a forward: this sequence has the turn from here on. Throws: UsageError if another awaits a backward.
  void take_turn(std::size_t index);
  /// The current stream waits for all uses of the memory; outputs that are still held are copied out.
  void give_up_turn();
  /// After the graphs were dropped: blocks the host until no tensor that this sequence gave out is read in its memory.
  void leave_memory() noexcept;
  /// Before the first capture: other sequences release what they have in shared memory. Throws: as take_turn.
  void begin_capture();
  /// After the last capture: in shared memory later sequences compute where the outputs are.
  void share_outputs();

  /// True if `given` is the output that `input` is linked to: the one of the latest forward, in whatever memory it is by now.
  [[nodiscard]] bool is_linked_output(const StaticInput& input, const at::Tensor& given) const;
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
  [[nodiscard]] std::string describe(std::size_t index) const {
    return "graphed call \"" + calls_[index].spec.name + "\"";
  }
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
  std::shared_ptr<HostArena> arena_;
  GraphOptions options_;
  std::shared_ptr<GraphMemory> memory_;
  DrawOrder& draw_order_;
  std::vector<OwnedStream> side_streams_;
  std::vector<c10::Stream> streams_;
  std::vector<c10::Stream> given_streams_;  ///< of ReplayOptions, each once
  Event fork_;
  Event whole_stream_;
  std::shared_ptr<MemoryPool> pool_;  ///< shared with held outputs that lie in its free blocks
  SequenceOrder order_;               ///< its runs are the calls
  CapturedCalls calls_;
  Profile profile_;
  Plan plan_;
  OutsideBytes outside_;

  // Replay.
  std::recursive_mutex& mutex_;           ///< the memory's
  std::optional<c10::Stream> called_on_;  ///< the latest launch
  std::int64_t latest_ = -1;              ///< the call whose forward was launched last
  PendingRuns pending_;                   ///< calls whose backward is still to come
  ReleasedOutputs released_;
  std::vector<std::size_t> gave_gradients_;  ///< calls that gave out gradients in their memory since, the highest first
  std::size_t highest_given_ = 0;  ///< no call above it has given out outputs since a forward below was launched
  std::shared_ptr<EagerOffload> eager_;
  SequenceCopies copies_;
  PoolUse use_;
  Counts counts_;
};

}  // namespace sidestream
