#pragma once
#include <cstdint>
#include <vector>

#include "sidestream/detail/export.h"

namespace sidestream {

/// A pipeline: ranks that each hold a part of a model, and the microbatches of a step.
///
/// The model is cut into `ranks * stages` parts, the virtual stages. Rank r holds the parts r, r + ranks, r + 2 * ranks, and so on. On its
/// rank a virtual stage has a number from 0. One microbatch through one virtual stage is a chunk.
struct PipelineShape {
  std::int64_t ranks = 1;         ///< ranks of the pipeline (PP)
  std::int64_t stages = 1;        ///< virtual stages on each rank (VPP)
  std::int64_t microbatches = 1;  ///< microbatches of a step
  /// With several virtual stages: how many microbatches in a row go through one of them before the next one begins. At least `ranks`; if
  /// microbatches remain after the last whole group, they must be at least `ranks` too. 0 chooses the smallest number that is allowed.
  std::int64_t group = 0;
  /// Computes the weight gradients of each chunk in a step of their own.
  bool delay_weight_gradients = false;
};

/// What a rank does at one point of its order: the forward, the backward or the weight gradients of one chunk.
struct PipelineStep {
  /// If weight gradients are delayed, a backward computes the gradients of the chunk's inputs only.
  enum class Kind : std::uint8_t { forward, backward, weight_gradients };

  std::int64_t stage = 0;       ///< the virtual stage, by its number on this rank
  std::int64_t microbatch = 0;  ///< the microbatch
  Kind kind = Kind::forward;    ///< which work of the chunk

  /// The same work of the same chunk.
  friend bool operator==(const PipelineStep& a, const PipelineStep& b) noexcept {
    return a.stage == b.stage && a.microbatch == b.microbatch && a.kind == b.kind;
  }
};

/// The order in which one rank runs the chunks of a step.
///
/// With one virtual stage this is 1F1B. A rank first runs `ranks - rank - 1` forwards, then forwards and backwards by turns, then the
/// remaining backwards. With several virtual stages it is the interleaved order: a rank runs more forwards first, and waits less.
///
/// Delayed weight gradients make a zero-bubble order (ZB-H1) of either. They come in the order of their backwards. Rank 0 runs the most
/// forwards first; a later rank delays as many weight gradients as it runs fewer forwards first. So no rank keeps the saved tensors of
/// more chunks than rank 0 does without delay.
///
/// If each rank runs its order of one shape, no rank waits forever.
/// Threads: any.
/// Throws: UsageError for numbers below 1, a rank that does not exist, more than 1,048,576 chunks, and a group that is not allowed. The
/// message gives the numbers and the remedy.
/// Source: Narayanan et al. 2021 (interleaved), as Megatron-LM runs it; Qi et al. 2023 (ZB-H1).
[[nodiscard]] SIDESTREAM_API std::vector<PipelineStep> pipeline_order(const PipelineShape& shape, std::int64_t rank);

/// A step of an order, with the times at which it begins and ends.
struct TimedStep {
  PipelineStep step;       ///< the step
  std::int64_t begin = 0;  ///< when it begins, 0 for the first step of all
  std::int64_t end = 0;    ///< when it ends
};

/// When each step runs if every rank runs its order as early as it can: result[r][i] is the time of `orders[r][i]`.
///
/// A forward takes 1 unit of time. A backward takes 2, or 1 if `orders` have weight gradients as steps, which take 1. Sending takes no
/// time. A forward waits for the same microbatch's forward in the virtual stage before, a backward for its backward in the virtual stage
/// after. In the last virtual stage a backward waits for its forward.
/// Threads: any.
/// Throws: UsageError if a step occurs twice or would wait forever, and if some weight gradients are steps, but not those of each
/// backward. The message names the step, what it waits for, and the remedy.
[[nodiscard]] SIDESTREAM_API std::vector<std::vector<TimedStep>> pipeline_times(
    const std::vector<std::vector<PipelineStep>>& orders);

}  // namespace sidestream
