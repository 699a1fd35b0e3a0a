#pragma once
#include <cstdint>
#include <vector>

#include "sidestream/pipeline_order.h"

namespace sidestream::habits {

struct Action;
struct StepPlan;

/// When delayed weight gradients are computed: after each backward, after every second one, at the step's end in the order of the
/// backwards, there by chunks in the opposite order, and in the next step not all of them.
enum class WeightTime : std::uint8_t { at_once, after_two, at_end, reversed, forgotten };
constexpr std::int64_t kWeightTimes = 5;

/// How a step with chunks does not keep to its order, or to the rules of chunks.
enum class Deviation : std::uint8_t {
  none,
  later_chunk,      ///< one that comes later is begun
  unknown_chunk,    ///< one that is not in the order
  repeated_chunk,   ///< one that the step has had
  left,             ///< one that comes later is begun, and the trainer leaves the step
  missing_chunks,   ///< the step ends early
  bad_order,        ///< the step is begun with a backward before its forward
  open_chunk,       ///< a chunk is open when the step ends
  weights_twice,    ///< backward_dw of one chunk is called twice
  weights_of_none,  ///< or of a chunk that the step has not had
};
constexpr std::int64_t kDeviations = 9;

/// A step whose forwards are chunks of the stages that one rank holds. Each stage has data and a loss of its own.
struct ChunkPlan {
  enum class Overlap : std::uint8_t { none, alternating, overtaking };

  std::int64_t stages = 1;
  std::vector<PipelineStep> order;
  bool ordered = false;             ///< the engine is told the order
  bool weight_steps = false;        ///< the order says when weight gradients are computed
  Overlap overlap = Overlap::none;  ///< of a forward and the one behind it, layer by layer
  bool first_outside = false;       ///< the first forward is in no chunk
  std::int64_t thrown_at = 0;  ///< by its number: the only forward in which the user's code throws, if the plan says so
  bool caught = false;         ///< the trainer goes on without that forward
  Deviation deviation = Deviation::none;
  std::int64_t deviation_at = 0;  ///< before the forward of this number

  [[nodiscard]] bool finish_throws() const {
    return deviation == Deviation::missing_chunks || deviation == Deviation::open_chunk;
  }
};

/// Digits of an action's numbers: what the order looks like, and what happens in it.
constexpr std::int64_t kChunkLayouts = 3 * 3 * 6 * 6 * 3 * 2;
constexpr std::int64_t kChunkUses = 26 * 3 * 4;

/// Of the `repetition`th step of an action of chunks.
[[nodiscard]] StepPlan plan_of_chunks(const Action& action, std::int64_t repetition);

}  // namespace sidestream::habits
