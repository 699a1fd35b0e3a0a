#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "analysis/group_order.h"
#include "sidestream/pipeline_order.h"

namespace sidestream {

/// The order that a step was given; null if there is none.
using GivenOrder = std::shared_ptr<const std::vector<PipelineStep>>;

/// The chunk of a pipeline that a group belongs to.
struct GroupChunk {
  std::int64_t stage = 0;    ///< its virtual stage
  std::uint64_t number = 0;  ///< counts the chunks of a step from 1; 0: the group belongs to none

  friend bool operator==(const GroupChunk&, const GroupChunk&) = default;
};

/// The eager groups of a step. Plain data.
struct StepGroups {
  std::vector<GroupEvent> events;  ///< what happened to them, in order
  std::vector<GroupBytes> bytes;   ///< by group
  std::vector<GroupChunk> chunks;  ///< by group

  void clear() noexcept;
  friend bool operator==(const StepGroups&, const StepGroups&) = default;
};

/// What a step with the chunks in `order` does, if each of its chunks does what those of its virtual stage did in the step `known`. Not set
/// if `known` does not tell: a group belonged to no chunk, or chunks of one virtual stage had different groups. Pure.
[[nodiscard]] std::optional<StepGroups> groups_of_order(const std::vector<PipelineStep>& order,
                                                        const StepGroups& known);

/// A slot for the calls of each forward of `order`. Two chunks of a stage that are in flight together have different slots. The chunks of
/// a stage get the slots 0, 1 and so on. If the order repeats one part, and no chunk is in flight after a part, each part begins with slot
/// 0. A chunk is in flight until its last step. Pure.
[[nodiscard]] std::vector<std::size_t> slots_of_order(const std::vector<PipelineStep>& order);

}  // namespace sidestream
