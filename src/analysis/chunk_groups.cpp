#include "analysis/chunk_groups.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

namespace sidestream {
namespace {

/// The groups of one chunk, counted from 0 as they end.
struct GroupsOfChunk {
  std::int64_t stage = 0;
  std::vector<GroupBytes> ended;
  std::vector<std::uint32_t> used;

  /// False if `other` has other groups. A chunk that awaits no backward uses none.
  [[nodiscard]] bool unite(const GroupsOfChunk& other) {
    if (ended.size() != other.ended.size()) {
      return false;
    }
    for (std::size_t i = 0; i < ended.size(); ++i) {
      ended[i].held = std::max(ended[i].held, other.ended[i].held);
      ended[i].offloaded =
          std::max(ended[i].offloaded, other.ended[i].offloaded);  // some stay where a backward follows at once
    }
    used = used.empty() ? other.used : used;
    return true;
  }
};

}  // namespace

void StepGroups::clear() noexcept {
  events.clear();
  bytes.clear();
  chunks.clear();
}

std::optional<StepGroups> groups_of_order(const std::vector<PipelineStep>& order, const StepGroups& known) {
  std::map<std::uint64_t, GroupsOfChunk> chunks;
  std::vector<std::uint32_t> in_chunk;  // by group: its number there
  for (std::size_t group = 0; group < known.bytes.size(); ++group) {
    const GroupChunk& chunk = known.chunks[group];
    if (chunk.number == 0) {
      return std::nullopt;
    }
    GroupsOfChunk& groups = chunks[chunk.number];
    groups.stage = chunk.stage;
    in_chunk.push_back(static_cast<std::uint32_t>(groups.ended.size()));
    groups.ended.push_back(known.bytes[group]);
  }
  for (const GroupEvent& event : known.events) {
    if (event.kind == GroupEvent::Kind::used) {
      chunks[known.chunks[event.group].number].used.push_back(in_chunk[event.group]);
    }
  }
  std::map<std::int64_t, GroupsOfChunk> stages;
  for (const auto& [number, groups] : chunks) {
    if (const auto [stage, added] = stages.try_emplace(groups.stage, groups); !added && !stage->second.unite(groups)) {
      return std::nullopt;
    }
  }
  StepGroups step;
  std::map<std::pair<std::int64_t, std::int64_t>, std::uint32_t> first;  // group of a chunk
  for (const PipelineStep& work : order) {
    const GroupsOfChunk& groups = stages[work.stage];  // none, if the stage had none
    if (work.kind == PipelineStep::Kind::forward) {
      first[{work.stage, work.microbatch}] = static_cast<std::uint32_t>(step.bytes.size());
      for (const GroupBytes& bytes : groups.ended) {
        step.events.push_back({static_cast<std::uint32_t>(step.bytes.size()), GroupEvent::Kind::ended});
        step.bytes.push_back(bytes);
        step.chunks.push_back({work.stage, first.size()});
      }
    } else if (work.kind == PipelineStep::Kind::backward) {
      for (const std::uint32_t group : groups.used) {
        step.events.push_back({first[{work.stage, work.microbatch}] + group, GroupEvent::Kind::used});
      }
    }
  }
  return step;
}

namespace {

/// How many chunks each step of `order` adds to those in flight, or ends: 1, 0 or -1.
std::vector<int> changes_in_flight(const std::vector<PipelineStep>& order) {
  std::vector<int> changes(order.size());
  std::map<std::pair<std::int64_t, std::int64_t>, std::size_t> last;  // step of a chunk behind its forward
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (order[i].kind == PipelineStep::Kind::forward) {
      changes[i] = 1;
    } else {
      last[{order[i].stage, order[i].microbatch}] = i;
    }
  }
  for (const auto& [chunk, i] : last) {
    changes[i] = -1;
  }
  return changes;
}

/// Slots of chunks, counted by stage. `again`: the count begins at 0 again when no chunk is in flight.
std::vector<std::size_t> counted_slots(const std::vector<PipelineStep>& order, const std::vector<int>& changes,
                                       bool again) {
  std::vector<std::size_t> slots;
  int in_flight = 0;
  std::map<std::int64_t, std::size_t> next;  // by stage
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (order[i].kind == PipelineStep::Kind::forward) {
      if (in_flight == 0 && again) {
        next.clear();
      }
      slots.push_back(next[order[i].stage]++);
    }
    in_flight += changes[i];
  }
  return slots;
}

/// True if the order repeats one part, and no chunk is in flight after a part.
bool repeats_one_part(const std::vector<PipelineStep>& order, const std::vector<int>& changes) {
  int in_flight = 0;
  std::size_t length = 0;
  std::map<std::pair<std::int64_t, std::int64_t>, std::size_t> begun;  // by chunk: the step of its forward
  for (std::size_t i = 0; i < order.size(); ++i) {
    const auto forward_of = [&](std::size_t step) { return begun.at({order[step].stage, order[step].microbatch}); };
    if (order[i].kind == PipelineStep::Kind::forward) {
      begun[{order[i].stage, order[i].microbatch}] = i;
    }
    const std::size_t first = length > 0 ? i % length : i;  // the same step of the first part
    // Two parts whose backwards come in different orders differ, though they have the same kinds of steps.
    if (order[i].stage != order[first].stage || order[i].kind != order[first].kind ||
        forward_of(i) - forward_of(first) != i - first) {
      return false;
    }
    in_flight += changes[i];
    length = length == 0 && in_flight == 0 ? i + 1 : length;
  }
  return length > 0;
}

}  // namespace

std::vector<std::size_t> slots_of_order(const std::vector<PipelineStep>& order) {
  const std::vector<int> changes = changes_in_flight(order);
  return counted_slots(order, changes, repeats_one_part(order, changes));
}

}  // namespace sidestream
