#include "graphs/calls/callable_order.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>

#include <c10/util/irange.h>

#include "analysis/chunk_groups.h"
#include "graphs/calls/step_chunks.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw UsageError("GraphOptions::order: " + what); }

/// `order` without forwards alone. Throws: UsageError if nothing is left, and for weight gradients that nothing delays.
std::vector<PipelineStep> with_backward(const std::vector<PipelineStep>& order, bool delayed) {
  check_order(order, "GraphOptions::order");
  std::set<std::pair<std::int64_t, std::int64_t>> chunks;
  for (const PipelineStep& step : order) {
    if (step.kind == PipelineStep::Kind::weight_gradients && !delayed) {
      refuse("the order has weight gradients as steps (" + describe(ChunkId{step.stage, step.microbatch}) +
             "), but the backward computes them; set GradientPolicy::delayed for these parameters "
             "(GraphOptions::gradients), or give an order without them");
    }
    if (step.kind == PipelineStep::Kind::backward) {
      chunks.emplace(step.stage, step.microbatch);
    }
  }
  if (chunks.empty()) {
    refuse("the order has no backward, so nothing is captured; give the forward and the backward of each microbatch");
  }
  std::vector<PipelineStep> trained;
  std::copy_if(order.begin(), order.end(), std::back_inserter(trained), [&](const PipelineStep& step) {
    return chunks.count({step.stage, step.microbatch}) > 0;
  });
  return trained;
}

/// The numbers of the callables, by stage. Throws: UsageError if they are not of the stages of `order`.
std::map<std::int64_t, std::vector<std::size_t>> by_stage(const std::vector<PipelineStep>& order,
                                                          const std::vector<Callable>& callables) {
  std::map<std::int64_t, std::vector<std::size_t>> stages;
  for (const PipelineStep& step : order) {
    stages[step.stage];
  }
  for (const auto i : c10::irange(callables.size())) {
    const auto stage = stages.find(callables[i].stage());
    if (stage == stages.end()) {
      refuse("callable \"" + callables[i].name() + "\" is of stage " + std::to_string(callables[i].stage()) +
             ", which has no backward in the order; set Callable::stage to the stage on this rank that it belongs to");
    }
    stage->second.push_back(i);
  }
  for (const auto& [stage, of_stage] : stages) {
    if (of_stage.empty()) {
      refuse("the order has stage " + std::to_string(stage) +
             ", but no callable is of that stage; set Callable::stage, or give an order without that stage");
    }
  }
  return stages;
}

}  // namespace

CallableOrder::CallableOrder(const std::vector<PipelineStep>& order, const std::vector<Callable>& callables,
                             std::int64_t most, bool delayed) {
  const std::vector<PipelineStep> trained = with_backward(order, delayed);
  const auto stages = by_stage(trained, callables);
  const std::vector<std::size_t> slots = slots_of_order(trained);
  if (const std::size_t needed = *std::max_element(slots.begin(), slots.end()) + 1;
      needed > static_cast<std::size_t>(most)) {
    refuse("the order needs " + std::to_string(needed) + " captures of a callable, one for each microbatch, but the " +
           "engine's CallOptions::max_captures allows " + std::to_string(most) +
           "; raise it (Options::call_options), or give an order with fewer microbatches");
  }
  std::map<std::pair<std::int64_t, std::size_t>, std::size_t> captured;  // by stage and slot
  std::vector<SequenceStep> steps;
  for (const PipelineStep& step : trained) {
    const std::vector<std::size_t>& of_stage = stages.at(step.stage);
    const ChunkId id{step.stage, step.microbatch};
    if (step.kind == PipelineStep::Kind::forward) {
      const auto [known, is_new] = captured.try_emplace({step.stage, slots[chunks_.size()]}, captured.size());
      chunks_.push_back({id, known->second, is_new});
      for (auto i = of_stage.begin(); i != of_stage.end() && is_new; ++i) {
        steps.push_back({*i, known->second, Direction::forward});
        runs_.push_back({*i, step.stage, known->second});
      }
    } else if (const Chunk& chunk = *find(id); chunk.first) {
      const Direction direction = step.kind == PipelineStep::Kind::backward ? Direction::backward : Direction::weights;
      for (auto i = of_stage.rbegin(); i != of_stage.rend(); ++i) {
        steps.push_back({*i, chunk.captured, direction});
      }
    }
  }
  graphs_ = SequenceOrder(std::move(steps));
}

std::vector<CallSpec> CallableOrder::specs_of(const std::vector<CallSpec>& of_callables) const {
  std::vector<CallSpec> specs;
  std::vector<std::size_t> latest(of_callables.size());  // run of each callable
  for (const Run& run : runs_) {
    latest[run.callable] = specs.size();
    CallSpec& spec = specs.emplace_back(of_callables[run.callable]);
    const auto chunk =
        std::find_if(chunks_.begin(), chunks_.end(), [&](const Chunk& each) { return each.captured == run.chunk; });
    spec.chunk = " (" + describe(chunk->id) + ")";
    for (CallInput& input : spec.inputs) {
      if (!input.from) {
        continue;
      }
      const Run& giver = runs_[latest[input.from->call]];
      if (giver.callable != input.from->call || giver.chunk != run.chunk) {
        refuse("callable \"" + spec.name + "\" takes an output of \"" + of_callables[input.from->call].name +
               "\", which is of another stage; give it a tensor as sample: the trainer passes tensors between stages");
      }
      input.from->call = latest[input.from->call];
    }
  }
  return specs;
}

const CallableOrder::Chunk* CallableOrder::find(const ChunkId& id) const noexcept {
  const auto found = std::find_if(chunks_.begin(), chunks_.end(), [&](const Chunk& chunk) { return chunk.id == id; });
  return found == chunks_.end() ? nullptr : &*found;
}

std::optional<std::size_t> CallableOrder::last_before_rest(std::size_t run) const {
  while (run > 0 && runs_[run - 1].chunk == runs_[run].chunk) {
    --run;
  }
  if (run == 0) {
    return std::nullopt;
  }
  const std::size_t last = graphs_.by_backward()[run - 1];
  return graphs_.backward_index(last) < graphs_.forward_index(run) ? std::optional(last) : std::nullopt;
}

bool CallableOrder::ended_with_chunk_of(std::size_t run, const SequenceHolder& captures) const {
  const std::optional<std::size_t> latest = captures.sequence->latest_backward();
  for (std::size_t each = 0; latest && each < runs_.size(); ++each) {
    if (runs_[each].chunk == runs_[run].chunk && captures.index_of(each) == *latest) {
      return true;
    }
  }
  return false;
}

const CallVariant& CallableOrder::next(const CallSite& site, const RunningChunk* chunk, std::uint64_t step) const {
  const std::vector<CallVariant>& captures = site.variants.all;
  if (chunk != nullptr) {
    const Chunk* const mine = find(chunk->id);
    if (mine == nullptr || chunk->id.stage != captures.front().stage) {
      throw UsageError(describe(site) + ": expected a chunk of stage " + std::to_string(captures.front().stage) +
                       " that has a backward in GraphOptions::order, got " + describe(chunk->id) +
                       "; call it in such a chunk, or make the callables with the order of your steps");
    }
    return *std::find_if(captures.begin(), captures.end(),
                         [&](const CallVariant& capture) { return capture.slot == mine->captured; });
  }
  const SequenceHolder& holder = *captures.front().holder;  // of all runs
  const auto in_flight = [&] { return holder.sequence->pending().any(); };
  if (step != step_ && (step != 0 || !in_flight())) {
    return captures.front();
  }
  const auto found = std::find_if(captures.begin(), captures.end(),
                                  [&](const CallVariant& capture) { return capture.call >= next_run_; });
  if (found == captures.end()) {
    return captures.front();
  }
  if ((next_run_ > 0 && runs_[next_run_ - 1].chunk == runs_[found->call].chunk) || in_flight()) {
    return *found;
  }
  const std::optional<std::size_t> last = last_before_rest(found->call);
  // A step may leave out backwards. Outside of steps, a chunk without its backward is of a pass that failed.
  const bool in_turn = last && (step != 0 || ended_with_chunk_of(*last, holder));
  return in_turn ? *found : captures.front();
}

}  // namespace sidestream
