#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "analysis/planner.h"
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

/// Device memory that a sequence took outside of LibTorch's allocator, in bytes: how much the use of the device grew meanwhile. It
/// includes what other processes took.
struct OutsideBytes {
  std::int64_t warm_up = 0;  ///< kernels and libraries that were loaded, their handles: eager passes take it as well
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

  /// True when `inputs` are what `call` was captured with, but for their addresses.
  [[nodiscard]] bool accepts(std::size_t call, c10::ArrayRef<at::Tensor> inputs) const;
  /// Throws: UsageError that says which input differs, and how.
  void check(std::size_t call, c10::ArrayRef<at::Tensor> inputs) const;
  /// Whether the caller of a forward has asked `accepts`.
  enum class Inputs : std::uint8_t { unknown, accepted };
  /// Replays the forward of `call`, whose state (modes, model) the caller has compared.
  /// Throws: UsageError (see GraphedCallable); nothing has been queued then.
  /// `target`: where to, if the caller says so.
  void forward(std::size_t call, c10::ArrayRef<at::Tensor> inputs, detail::TensorBuffer& outputs,
               const ReplayOptions* target = nullptr, Inputs known = Inputs::unknown);
  /// True while a forward of `call` awaits its backward.
  [[nodiscard]] bool pending(std::size_t call) const;
  /// True when `call` may replay its forward now: neither it nor a later one awaits its backward.
  [[nodiscard]] bool ready(std::size_t call) const;
  [[nodiscard]] bool any_pending() const;
  /// True while a sequence that shares its memory awaits a backward: no graph of this one may be launched.
  [[nodiscard]] bool has_to_wait() const;
  /// Before a capture in its memory. Throws: UsageError where another awaits a backward.
  void check_turn() const;
  /// Throws: UsageError that names the call whose backward is pending; `what`: the call that would be replayed.
  [[noreturn]] void refuse_turn(const std::string& what) const;
  [[nodiscard]] const std::shared_ptr<GraphMemory>& memory() const noexcept { return memory_; }
  /// True for captures of forwards alone, made under no_grad.
  [[nodiscard]] bool forwards_alone() const { return !calls_.front().spec.state.modes.gradients; }
  /// In what the model differs from what the graphs of `call`, or of any, have frozen.
  [[nodiscard]] FactsChange change(std::size_t call) const noexcept;
  [[nodiscard]] FactsChange change() const noexcept;
  /// Of `call`, with all modules that a plain function may reach: for who looks at no other time. See ModuleFacts::attend_to.
  [[nodiscard]] FactsChange change_of_all(std::size_t call) const noexcept;
  /// The same in words, for an error. Allocates.
  [[nodiscard]] std::string difference(std::size_t call) const;
  /// What the calls must be captured again for before a pass: weights that were frozen, unfrozen, replaced or relocated. Left out:
  /// changes with which a call runs eagerly (modes, options) or is refused (dtype, shape); and that weights which
  /// capture-time hooks put in place are elsewhere, since they may not be there yet.
  [[nodiscard]] FactsChange change_before_pass() const noexcept;
  /// True when a forward of `call` begins a pass: no call awaits its backward. Forwards alone await none: there a pass begins with a
  /// call that is not after the one called last.
  [[nodiscard]] bool begins_pass(std::size_t call) const;
  /// Drops one call's graphs, or all, and with all of them the memory that they made. Idempotent.
  void reset(std::size_t call);
  void reset();
  /// Drops one call's graphs and gives back all that it has and no other call reads. Idempotent.
  void release(std::size_t call);
  /// True once nothing is left of any call.
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
  GraphSequence(const GraphResources& resources, const GraphOptions& options);

  /// True where `input` is another call's output, which must be passed as long as that call makes it.
  [[nodiscard]] bool is_linked(const StaticInput& input) const {
    return input.from && !calls_[input.from->call].released;
  }

  /// The current stream waits for the one that the latest graph was called on, which is behind that graph and what was read of it there.
  void follow_latest_call();
  /// Before the launch of a forward: the memory is this sequence's from here on. Throws: UsageError where another awaits a backward.
  void take_turn(std::size_t index);
  /// The current stream waits for all that lies in the memory; what is held of the outputs is copied out.
  void give_up_turn();
  /// The graphs are gone: blocks the host until nothing that this sequence gave out is read in its memory.
  void leave_memory() noexcept;
  /// Before the first capture: what other sequences hold of shared memory is theirs no longer. Throws: as take_turn.
  void begin_capture();
  /// Behind the last capture: in shared memory the outputs lie where the sequences to come compute.
  void share_outputs();

  /// True where `given` is the output that `input` is linked to: that of the latest forward there, wherever it lies by now.
  [[nodiscard]] bool is_linked_output(const StaticInput& input, const at::Tensor& given) const;
  void write_static_inputs(CapturedCall& call, c10::ArrayRef<at::Tensor> inputs);
  /// Before the launch of the graph at `graph_index`: outputs of earlier calls whose memory it uses again.
  void overwrite_released_outputs(std::size_t graph_index);
  /// Before the same: gradients of parameters that lie in the graphs' own memory and were given out by this graph, or by later ones.
  /// They were given memory that this graph may use.
  void overwrite_given_gradients(std::size_t graph_index);
  /// No graph of this sequence is launched again: what is held, in memory that others may use, gets memory of its own, and what nobody
  /// holds is read by nobody any more when this returns.
  void part_with_outputs() noexcept;
  /// The same of one, but for the wait. What finds no room stays in shared memory, or keeps memory that is this sequence's own.
  void part_with(OutputStorage& storage, OutputCounts& counts) noexcept;
  void attach_node(std::size_t index, c10::ArrayRef<at::Tensor> inputs, detail::TensorBuffer& outputs);
  /// Replays the backward of `call`; `grads` become the gradients of inputs, then of parameters.
  void backward(std::size_t index, std::uint64_t generation, std::vector<at::Tensor>& grads);
  /// Throws: UsageError; nothing has been queued then.
  void check_backward(std::size_t index, std::uint64_t generation);
  /// Throws: UsageError where the backward graph would read or do something else than at its capture.
  void check_backward_state(std::size_t index) const;
  void launch_backward(std::size_t index);
  void write_static_grads(CapturedCall& call, const std::vector<at::Tensor>& grads);
  /// The backward of `call` has run, or will not: which one is due next.
  void settle_pending(std::size_t index) noexcept;
  /// After a failure behind a launch: nothing that was queued on `side` runs any more.
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
  /// What is held of the outputs of `call` gets memory of its own, and theirs is given up. Stays where there is no room for that.
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
  std::shared_ptr<MemoryPool> pool_;  ///< shared with what is held of outputs that lie in memory of its free blocks
  CapturedCalls calls_;
  Profile profile_;
  Plan plan_;
  OutsideBytes outside_;

  // Replay.
  std::recursive_mutex& mutex_;           ///< the memory's
  std::optional<c10::Stream> called_on_;  ///< the latest launch
  std::int64_t latest_ = -1;              ///< the call whose forward was launched last
  std::int64_t top_ = -1;                 ///< the highest pending call
  ReleasedOutputs released_;
  std::vector<std::size_t> gave_gradients_;  ///< calls whose memory was given out since, the highest first
  std::size_t highest_given_ = 0;  ///< no call above has given out outputs since a forward below it was launched
  std::shared_ptr<EagerOffload> eager_;
  SequenceCopies copies_;
  PoolUse use_;
  Counts counts_;
};

}  // namespace sidestream
