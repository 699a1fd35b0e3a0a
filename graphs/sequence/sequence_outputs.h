#pragma once
#include <cstddef>
#include <memory>
#include <vector>

#include "analysis/sequence_order.h"
#include "graphs/outputs/output_storage.h"
#include "graphs/sequence/captured_call.h"
#include "graphs/sequence/graph_memory.h"
#include "runtime/runtime.h"

namespace sidestream {

/// Outputs and gradients that a sequence gave out in the memory of its graphs. Those that are still held get memory of their own before
/// other work writes that memory: Note [Outputs are ordinary tensors] in output_storage.h.
///
/// Ordering: Note [Graph choreography] in graph_sequence.cpp.  Capture: illegal.  Threads: one at a time (the sequence's mutex).
class SequenceOutputs {
 public:
  struct Counts {
    OutputStorage::Counts outputs;
    OutputStorage::Counts gradients;  ///< of parameters and inputs
  };

  /// `calls`, their `order`, the `released` outputs in the order of their graph indices, and `mark` must outlive this object. `mark` is
  /// recorded anew for each wait.
  SequenceOutputs(std::shared_ptr<Runtime> runtime, CapturedCalls& calls, const SequenceOrder& order,
                  const std::vector<ReleasedOutput>& released, const Event& mark);

  /// Before the launch of the graph at `graph_index`: handles all memory that this graph may write.
  /// Throws: as OutputStorage::before_overwrite; the next launch repeats the rest.
  void before_launch(std::size_t graph_index);
  /// The backward of `call` gave out gradients in the graphs' memory.
  void gave_gradients(std::size_t call) { gave_gradients_.push_back(call); }
  /// Before another sequence writes the memory. Throws: as before_launch.
  void copy_out_all();
  /// No graph of `call` is launched again: held outputs get memory of their own, and the call's memory for outputs is freed. If there is no
  /// room, they stay.
  void release(std::size_t call) noexcept;
  /// No graph of the sequence is launched again. Held outputs in memory that other sequences may use get memory of their own.
  void copy_out_at_end(GraphMemory& memory) noexcept;

  [[nodiscard]] Counts& counts() noexcept { return counts_; }

 private:
  /// Outputs that later forwards gave out in an earlier pass.
  void overwrite_later(std::size_t graph_index);
  /// Outputs of earlier calls whose memory the graph uses again.
  void overwrite_released(std::size_t graph_index);
  /// Gradients that this graph or a later one gave out.
  void overwrite_gradients(std::size_t graph_index);
  void overwrite_outputs_of(CapturedCall& call);
  /// If there is no room, the output stays in shared memory, or keeps the sequence's own memory.
  void copy_out_or_keep(OutputStorage& storage, GraphMemory& memory, OutputStorage::Counts& counts) noexcept;

  std::shared_ptr<Runtime> runtime_;
  CapturedCalls& calls_;
  const SequenceOrder& order_;
  const std::vector<ReleasedOutput>& released_;
  const Event& mark_;
  std::size_t next_released_ = 0;  ///< all before it were overwritten, or not given out since
  std::size_t highest_given_ = 0;  ///< no call above it has given out outputs since a forward below was launched
  std::vector<std::size_t> gave_gradients_;  ///< calls that gave out gradients in their memory since, the highest first
  Counts counts_;
};

}  // namespace sidestream
