#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "analysis/chunk_groups.h"
#include "sidestream/chunk.h"
#include "sidestream/pipeline_order.h"
#include "sidestream/report.h"

namespace sidestream {

class EagerOffload;
class GraphSequence;
class GroupMover;

/// "stage 0, microbatch 1"
[[nodiscard]] std::string describe(const ChunkId& id);
/// `where`: begins the message. Throws: UsageError for an order that no step can take.
void check_order(const std::vector<PipelineStep>& order, const std::string& where);

/// One chunk of a step.
struct RunningChunk {
  static constexpr std::size_t never = static_cast<std::size_t>(-1);

  ChunkId id;
  std::uint64_t number = 0;  ///< counts the chunks of all steps
  /// Of its graphed calls: see RecordedCall::slot. The step's order decides, or the first of the calls.
  std::optional<std::size_t> slot = {};
  GivenOrder order = {};                    ///< that decides; null if the first call does
  const GraphSequence* sequence = nullptr;  ///< in which its latest call replayed; only compared
  std::size_t next_run = 0;                 ///< one past that call's run in the sequence
  std::size_t backward_at = never;          ///< where its backward is in the order
  std::size_t weights_at = never;           ///< and its weight gradients
  std::uint64_t offloaded_bytes = 0;        ///< whose copies were queued while it was active
  bool weights_computed = false;            ///< by OffloadEngine::backward_dw for this chunk
};

/// The chunks of one step: which are open, which one calls belong to, and whether they come in the order that the step was given.
/// Steps like the step before allocate nothing. Threads: the step's.
class StepChunks {
 public:
  /// Both are the engine's. `mover` counts all copies; `eager` is told which groups belong to which chunk. If an order needs at most
  /// `most_slots`, its chunks get their slots from it.
  StepChunks(std::shared_ptr<const GroupMover> mover, std::shared_ptr<EagerOffload> eager,
             std::size_t most_slots) noexcept
      : mover_(std::move(mover)), eager_(std::move(eager)), most_slots_(most_slots) {}

  /// `order`: of the step that is to begin; null if there is none.
  /// Throws: UsageError for an order that no step can take. Nothing has changed then.
  void begin_step(const std::vector<PipelineStep>* order);
  /// The step has begun.
  void step_begun();
  /// Returns the chunk's number. Throws: UsageError for a chunk that may not begin now.
  std::uint64_t begin(const ChunkId& id);
  /// Calls belong to that chunk from here on. False if it has ended.
  bool resume(std::uint64_t number) noexcept;
  /// False if it has ended before.
  bool end(std::uint64_t number) noexcept;
  /// No chunk is open any more. Throws: UsageError for chunks that were open, and for chunks of the order that have not come.
  void end_step();
  /// The same for a step that failed.
  void abandon_step() noexcept;

  /// The number of the step that has begun and not ended; 0 outside of steps.
  [[nodiscard]] std::uint64_t step() const noexcept { return in_step_ ? step_ : 0; }
  /// That calls belong to now; null if there is none.
  [[nodiscard]] RunningChunk* active() noexcept { return open_.empty() ? nullptr : &chunks_[open_.back()]; }
  /// The chunk of that number; null if it is none of this step's.
  [[nodiscard]] const RunningChunk* find(std::uint64_t number) const noexcept {
    const bool here = number >= first_number_ && number - first_number_ < chunks_.size();
    return here ? &chunks_[number - first_number_] : nullptr;
  }
  /// A chunk of the step whose weight gradients are to be computed.
  /// Throws: UsageError if the step has not had the chunk, if its forward has not ended, or if they are computed.
  RunningChunk& chunk_for_weights(const ChunkId& id);
  /// How many slots the latest order needs, if these are too many.
  [[nodiscard]] std::optional<std::size_t> too_many_slots() const noexcept { return too_many_slots_; }
  /// Of the latest step.
  void report(std::vector<ChunkReport>& chunks) const;

 private:
  /// Throws: UsageError that says why `id` may not begin now.
  void check(const ChunkId& id) const;
  /// Of the order, from `next_` on; null if none is left.
  [[nodiscard]] const PipelineStep* next_forward() noexcept;
  /// Tells `eager_` what is active now.
  void tell() noexcept;
  /// What was copied since the latest call counts for the active chunk.
  void count_copies() noexcept;
  [[nodiscard]] std::vector<std::size_t>::iterator find_open(std::uint64_t number) noexcept;

  std::shared_ptr<const GroupMover> mover_;
  std::shared_ptr<EagerOffload> eager_;
  std::size_t most_slots_;
  std::vector<RunningChunk> chunks_;  ///< of the step, as they began
  std::vector<std::size_t> open_;     ///< the active one last
  std::uint64_t first_number_ = 1;    ///< of chunks_.front()
  bool in_step_ = false;              ///< the latest step has begun and not ended
  std::uint64_t step_ = 0;
  std::uint64_t copied_ = 0;                                          ///< bytes, at the latest count
  bool ordered_ = false;                                              ///< the step has an order
  GivenOrder order_ = std::make_shared<std::vector<PipelineStep>>();  ///< the latest one
  std::size_t next_ = 0;                                              ///< its steps before this one have come
  std::vector<std::size_t> slots_;  ///< by forward of `order_`; empty if it needs too many
  std::optional<std::size_t> too_many_slots_;
  std::vector<std::size_t> backwards_;  ///< by forward of `order_`: RunningChunk::backward_at
  std::vector<std::size_t> weights_;    ///< by forward of `order_`: RunningChunk::weights_at
};

}  // namespace sidestream
