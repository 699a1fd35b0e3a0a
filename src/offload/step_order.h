#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "analysis/chunk_groups.h"
#include "analysis/group_order.h"

namespace sidestream {

/// Learns in which order the groups of a step end and are first used. Tells the next step when to reload which groups, as long as that
/// step takes the same order, or the order of chunks that it was given. Groups are counted from 0 as they end.
///
/// Steps in the same order as the step before allocate nothing. Threads: one at a time.
class StepOrder {
 public:
  /// Nothing is known any more.
  void forget() noexcept;
  void begin() noexcept;
  /// After `begin`: the step runs the chunks in `order`; null if it was given none.
  void expect(const std::vector<PipelineStep>* order, const CopyWindow& window);
  /// Groups that end from here on belong to that chunk.
  void in_chunk(const GroupChunk& chunk) noexcept { chunk_ = chunk; }
  /// The next group.
  void ended(GroupBytes bytes);
  /// For the first time.
  void used(std::uint32_t group) { happened({group, GroupEvent::Kind::used}); }
  /// Something happened that the order has no word for.
  void depart() noexcept { follows_ = false; }
  /// True if this step has taken the learned order so far.
  [[nodiscard]] bool follows() const noexcept { return follows_; }
  /// While it does: the next group that is to be reloaded now; null if there is none.
  [[nodiscard]] const GroupReload* due() noexcept;
  void end(const CopyWindow& window);

  /// Of the latest step that has ended, or of this one: what happened up to now.
  [[nodiscard]] const std::vector<GroupEvent>& events() const noexcept { return step_.events; }

 private:
  void happened(GroupEvent event);

  StepGroups learned_;
  std::vector<PipelineStep> order_;  ///< of the chunks, that `learned_` stands for; empty if there is none
  std::vector<GroupReload> reloads_;
  std::size_t next_reload_ = 0;
  StepGroups step_;
  GroupChunk chunk_;
  bool in_step_ = false;
  bool follows_ = false;
};

}  // namespace sidestream
