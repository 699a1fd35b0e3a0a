#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "analysis/sequence_order.h"
#include "graphs/calls/call_site.h"
#include "graphs/guards/call_spec.h"
#include "sidestream/chunk.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/pipeline_order.h"

namespace sidestream {

struct RunningChunk;

/// Callables in the order of a rank's step (GraphOptions::order). A run is one callable in one captured chunk. Chunks that share captures
/// are one captured chunk.
/// Threads: the step's. Only the constructor and `specs_of` allocate.
class CallableOrder {
 public:
  struct Run {
    std::size_t callable = 0;
    std::int64_t stage = 0;
    std::size_t chunk = 0;  ///< the captured chunks are numbered as they begin
  };

  /// `most`: captures of one callable. `delayed`: there are delayed weight gradients.
  /// Throws: UsageError for an order that no step can take, that needs more captures, or that does not fit the callables.
  CallableOrder(const std::vector<PipelineStep>& order, const std::vector<Callable>& callables, std::int64_t most,
                bool delayed);

  /// In the order of their forwards.
  [[nodiscard]] const std::vector<Run>& runs() const noexcept { return runs_; }
  /// Of all runs, each a call of its own.
  [[nodiscard]] const SequenceOrder& graphs() const noexcept { return graphs_; }
  /// `of_callables`: of each callable. Gives those of the runs. Throws: UsageError for a link from one stage to another.
  [[nodiscard]] std::vector<CallSpec> specs_of(const std::vector<CallSpec>& of_callables) const;

  /// The capture that a call of `site` replays now: that of `chunk`; if it is null, the next one after the latest replay. `step`: see
  /// StepChunks::step. The first capture is next
  ///  - when a step begins, and after a step if nothing is in flight
  ///  - if nothing is in flight, but the order has a chunk in flight there
  ///  - outside of steps, if the order has none in flight there, but the latest graph is not of the chunk whose backward comes last before
  /// Throws: UsageError for a chunk that `site` is not captured for.
  [[nodiscard]] const CallVariant& next(const CallSite& site, const RunningChunk* chunk, std::uint64_t step) const;
  /// The capture of that run has replayed.
  void replayed(std::size_t run, std::uint64_t step) noexcept {
    next_run_ = run + 1;
    step_ = step;
  }

 private:
  struct Chunk {
    ChunkId id;
    std::size_t captured = 0;  ///< see Run::chunk
    bool first = false;        ///< of those that share the captures
  };
  [[nodiscard]] const Chunk* find(const ChunkId& id) const noexcept;
  /// If no chunk is in flight where the chunk of `run` begins: the run whose backward is the last one before. Not set for the first chunk.
  [[nodiscard]] std::optional<std::size_t> last_before_rest(std::size_t run) const;
  /// True if the latest graph of `captures` is the backward of a run in the chunk of `run`.
  [[nodiscard]] bool ended_with_chunk_of(std::size_t run, const SequenceHolder& captures) const;
  std::vector<Chunk> chunks_;  ///< with a backward, as they begin
  std::vector<Run> runs_;
  SequenceOrder graphs_;
  std::size_t next_run_ = 0;  ///< after that of the latest replay
  std::uint64_t step_ = 0;    ///< of that replay; 0 if it was outside of steps
};

}  // namespace sidestream
