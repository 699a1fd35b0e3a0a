#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "analysis/planner.h"
#include "analysis/sequence_order.h"
#include "graphs/outputs/output_storage.h"
#include "graphs/sequence/captured_call.h"
#include "graphs/sequence/graph_memory.h"
#include "graphs/sequence/pool_use.h"
#include "memory/host_arena.h"
#include "sidestream/graph_options.h"

namespace sidestream {

struct GraphResources;

/// What a sequence is: the captured calls, the order of their graphs, and the memory that the graphs share. A capture fills it. From then
/// on the GraphSequence that replays the calls owns it.
///
/// The functions compare a replay with the capture: the model, the inputs, and what comes before a backward.
struct CapturedSequence {
  /// Device memory that a sequence took outside of LibTorch's allocator, in bytes: by how much the use of the device grew. It includes
  /// memory that other processes took in that time.
  struct OutsideBytes {
    std::int64_t warm_up = 0;  ///< loaded kernels and libraries, and their handles: eager passes take it as well
    std::int64_t graphs = 0;   ///< executables of graphs, and what libraries took in captures
  };

  CapturedSequence(const GraphResources& resources, const GraphOptions& given, SequenceOrder steps);

  std::shared_ptr<HostArena> arena;  ///< holds what the calls offload
  GraphOptions options;
  std::shared_ptr<GraphMemory> memory;
  std::shared_ptr<MemoryPool> pool;  ///< shared with held outputs that lie in its free blocks; null after a reset
  std::shared_ptr<MemoryPool>
      weights_pool;     ///< for the graphs of delayed parameters, which replay in any order; null without any
  SequenceOrder order;  ///< its runs are the calls
  CapturedCalls calls;
  Profile profile;
  Plan plan;
  std::vector<std::uint64_t> selected;  ///< by call: bytes of saved tensors that the options name
  OutsideBytes outside;
  std::vector<ReleasedOutput> released_outputs;  ///< in the order of their graph indices
  std::vector<PoolUse::GraphUse> pool_use;       ///< by graph index
  std::vector<PoolUse::GraphUse> weights_use;    ///< of `weights_pool`, in the order of its graphs
  OutputStorage::Counts overwritten;             ///< outputs of earlier sequences, which the capture overwrote

  /// For errors and notes.
  [[nodiscard]] std::string describe(std::size_t call) const;
  /// A graph of `call` is to be launched while `obstacle` awaits its backward. `got`: "forward".
  /// Throws: UsageError, if the calls are of two chunks of an order.
  void check_turn(std::size_t call, std::size_t obstacle, const char* got) const;
  /// The same while `obstacle` awaits its weights graph.
  void check_turn_of_weights(std::size_t call, std::size_t obstacle, const char* got) const;
  /// True for captures of forwards alone, made under no_grad.
  [[nodiscard]] bool forwards_alone() const { return !calls.front().spec.state.modes.gradients; }
  /// Bytes of gradients that the graphs hold memory for, as CapturedCall::ungiven_bytes: only the call whose backward is last has any.
  [[nodiscard]] std::int64_t ungiven_bytes() const { return calls[order.by_backward().back()].ungiven_bytes(); }
  /// True if an input of `call` is the output of another call, which was not released.
  [[nodiscard]] bool is_linked(std::size_t call) const;
  /// True if all calls were released.
  [[nodiscard]] bool released() const;

  /// True if `inputs` are what `call` was captured with, except for their addresses.
  [[nodiscard]] bool accepts(std::size_t call, c10::ArrayRef<at::Tensor> inputs) const;
  /// True if one of `inputs` should be the output of a call that ran eagerly, and is not what that call's graph gave.
  [[nodiscard]] bool follows_eager_call(std::size_t call, c10::ArrayRef<at::Tensor> inputs) const;
  /// Throws: UsageError that says which input differs, and how.
  void check(std::size_t call, c10::ArrayRef<at::Tensor> inputs) const;
  /// Before the backward of `call` for its forward `generation`: checks the state, and the versions of the tensors that it reads.
  /// `has_turn`: the sequence has the turn in its memory. Throws: UsageError.
  void check_backward(std::size_t call, std::uint64_t generation, bool has_turn) const;
  /// The same of the order. `pending`: the calls that await a backward; those that may lack one are no obstacle. `weights`: those that
  /// await the gradients of delayed parameters.
  void check_order_of_backward(std::size_t call, const PendingRuns& pending, const PendingRuns& weights) const;

  /// Before the gradients of delayed parameters of `call` are computed. Throws: UsageError.
  void check_weights(std::size_t call) const;

  /// How the model differs from what the graphs of `call`, or of any call, have frozen.
  [[nodiscard]] FactsChange change(std::size_t call) const noexcept;
  [[nodiscard]] FactsChange change() const noexcept;
  /// Of `call`, with all modules that a plain function may reach. For callers that look at no other time. See ModuleFacts::attend_to.
  [[nodiscard]] FactsChange change_of_all(std::size_t call) const noexcept;
  /// Changes for which the calls must be captured again before a pass: weights that were frozen, unfrozen, replaced or relocated. Not
  /// among them are changes with which a call runs eagerly (modes, options) or is refused (dtype, shape). Weights that capture-time hooks
  /// place may be elsewhere: the hooks' owner may not have placed them yet.
  [[nodiscard]] FactsChange change_before_pass() const noexcept;
  /// The change of `call` in words, for an error. Allocates.
  [[nodiscard]] std::string difference(std::size_t call) const;
};

}  // namespace sidestream
