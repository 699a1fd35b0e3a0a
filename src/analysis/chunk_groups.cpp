#include "analysis/chunk_groups.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <utility>

#include "analysis/sequence_order.h"

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

/// Slots of chunks, counted by stage. `again`: from 0 after each step of the order behind which no chunk is in flight.
std::vector<std::size_t> counted_slots(const std::vector<PipelineStep>& order, bool again) {
  std::vector<std::size_t> slots;
  std::size_t in_flight = 0;
  std::map<std::int64_t, std::size_t> next;  // by stage
  for (const PipelineStep& step : order) {
    if (step.kind == PipelineStep::Kind::forward) {
      if (in_flight++ == 0 && again) {
        next.clear();
      }
      slots.push_back(next[step.stage]++);
    } else if (step.kind == PipelineStep::Kind::backward) {
      --in_flight;
    }
  }
  return slots;
}

/// True if the order is one part again and again, behind which no chunk is in flight.
bool repeats_one_part(const std::vector<PipelineStep>& order) {
  std::size_t in_flight = 0;
  std::size_t length = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (length > 0 && (order[i].stage != order[i % length].stage || order[i].kind != order[i % length].kind)) {
      return false;
    }
    in_flight += order[i].kind == PipelineStep::Kind::forward ? 1 : 0;
    in_flight -= order[i].kind == PipelineStep::Kind::backward ? 1 : 0;
    length = length == 0 && in_flight == 0 ? i + 1 : length;
  }
  return length > 0;
}

}  // namespace

std::vector<std::size_t> slots_of_order(const std::vector<PipelineStep>& order) {
  return counted_slots(order, repeats_one_part(order));
}

namespace {

/// The forwards and backwards of `order`, with a chunk's stage as the call and its slot as the microbatch. Chunks without a backward are
/// left out.
std::vector<SequenceStep> whole_chunks(const std::vector<PipelineStep>& order) {
  const std::vector<std::size_t> slots = slots_of_order(order);
  std::map<std::pair<std::int64_t, std::int64_t>, std::size_t> slot_of;  // by stage and microbatch
  std::set<std::pair<std::int64_t, std::int64_t>> end;
  std::size_t next = 0;
  for (const PipelineStep& step : order) {
    if (step.kind == PipelineStep::Kind::forward) {
      slot_of[{step.stage, step.microbatch}] = slots[next++];
    } else if (step.kind == PipelineStep::Kind::backward) {
      end.emplace(step.stage, step.microbatch);
    }
  }
  std::vector<SequenceStep> steps;
  for (const PipelineStep& step : order) {
    const std::pair chunk(step.stage, step.microbatch);
    if (step.kind != PipelineStep::Kind::weight_gradients && end.count(chunk) != 0) {
      steps.push_back({static_cast<std::size_t>(step.stage), slot_of[chunk],
                       step.kind == PipelineStep::Kind::forward ? Direction::forward : Direction::backward});
    }
  }
  return steps;
}

}  // namespace

bool may_replay(const std::vector<PipelineStep>& captured, const std::vector<PipelineStep>& given) {
  std::vector<SequenceStep> once;  // of captured chunks in equal slots, the first
  for (const SequenceStep& step : whole_chunks(captured)) {
    if (std::find(once.begin(), once.end(), step) == once.end()) {
      once.push_back(step);
    }
  }
  const SequenceOrder order(std::move(once));
  std::map<std::pair<std::size_t, std::size_t>, std::size_t> runs;
  for (std::size_t i = 0; i < order.size(); ++i) {
    runs[{order.steps()[i].call, order.steps()[i].microbatch}] = order.run_at(i);
  }
  PendingRuns pending(order);
  for (const SequenceStep& step : whole_chunks(given)) {
    const auto run = runs.find({step.call, step.microbatch});
    if (run == runs.end()) {
      continue;
    }
    if (step.direction == Direction::forward) {
      if (!pending.obstacle(order.forward_index(run->second))) {  // else it runs eagerly
        pending.begin(run->second);
      }
    } else if (pending.contains(run->second)) {
      if (pending.obstacle(order.backward_index(run->second))) {
        return false;
      }
      pending.end(run->second);
    }
  }
  return true;
}

}  // namespace sidestream
