// The part of Dispatcher that finds the capture in which a call may replay.
#include <algorithm>
#include <cstddef>
#include <vector>

#include "graphs/calls/call_site.h"
#include "graphs/calls/dispatcher.h"
#include "graphs/calls/engine_sequences.h"
#include "graphs/calls/step_chunks.h"
#include "graphs/sequence/replay_node.h"

namespace sidestream {

bool Dispatcher::is_of_other_microbatch(const Call& call, const CallVariant& variant) const {
  const GraphSequence& sequence = *variant.holder->sequence;
  // A call that follows a replay in the sequence is most often of the same microbatch: then no graph of autograd is walked.
  if (!variant.continues || latest_ == &sequence || !sequence.pending().any()) {
    return false;
  }
  // Linked inputs were compared already. All other calls went on from an earlier one when they were recorded.
  return !sequence.captured().is_linked(variant.index()) && !ReplayNode::connects(call.request.inputs, sequence);
}

bool Dispatcher::contradicts(const RunningChunk& chunk, const CallVariant& variant) const {
  const CapturedSequence& captured = variant.holder->captured();
  const std::size_t index = variant.index();
  const SequenceOrder& order = captured.order;
  static const RunningChunk none{};
  return variant.holder->sequence->pending().any_of([&](std::size_t pending) {
    const RunningChunk* const found = chunks_.find(captured.calls[pending].replay.chunk);
    const RunningChunk& other = found != nullptr ? *found : none;
    // Weight gradients may be computed earlier than in the captures.
    const auto too_late = [&](const RunningChunk& of, std::size_t run, const RunningChunk& than, std::size_t than_run) {
      return order.weights_index(run) <= order.backward_index(than_run) && of.weights_at > than.backward_at;
    };
    return other.number != chunk.number && other.backward_at != chunk.backward_at &&
           ((order.backward_index(pending) < order.backward_index(index)) != (other.backward_at < chunk.backward_at) ||
            too_late(other, pending, chunk, index) || too_late(chunk, index, other, pending));
  });
}

Dispatcher::Found Dispatcher::find(const Call& call) const {
  const bool by_inputs = call.site.kind == CallSite::Kind::callable;  // replay_callable looks at modes and weights
  // The calls of a chunk replay in the captures of one slot. A capture of another slot is for another chunk, even if it could replay.
  // What was captured in the order of a step is for chunks of steps that fit that order.
  const bool refuses = call.site.rules.on_pending == OnPending::error;
  const RunningChunk* const chunk = refuses ? nullptr : chunk_of(call);
  const auto of_other_chunk = [&](const CallVariant& variant) {
    if (chunk == nullptr) {
      return is_of_other_microbatch(call, variant);
    }
    if (chunk->slot && *chunk->slot != variant.slot) {
      return true;
    }
    if (variant.holder->order != nullptr) {
      return false;  // all chunks of an order are one sequence
    }
    // If a run of another sequence is pending, it is another chunk's. This chunk joins it only with an output of the run.
    const GraphSequence& sequence = *variant.holder->sequence;
    return chunk->sequence != &sequence && sequence.pending().any() && !sequence.captured().is_linked(variant.index());
  };
  const auto of_other_order = [&](const CallVariant& variant) {
    if (variant.holder->order == nullptr || refuses) {
      return false;
    }
    // A call that runs twice in a chunk has two runs. The first one's memory may be free for others, though it could replay again.
    const bool is_over =
        chunk != nullptr && chunk->sequence == variant.holder->sequence.get() && variant.index() < chunk->next_run;
    return chunk == nullptr || chunk->order == nullptr || chunk->id.stage != variant.stage || is_over ||
           (chunk->order != variant.holder->order && contradicts(*chunk, variant));
  };
  Found found;
  CallVariant* beside = nullptr;  // may replay, but beside a call of another microbatch
  const auto ends_with = [&](CallVariant& variant) {
    const GraphSequence& sequence = *variant.holder->sequence;
    const CapturedSequence& captured = sequence.captured();
    const std::size_t index = variant.index();
    if (!(by_inputs || captured.calls[index].spec.state.modes == call.modes) || !variant.accepts(call.request)) {
      found.other = &variant;
      return false;
    }
    if (!by_inputs) {
      // Where not all ranks capture, the step's begin has seen what is outdated and left it as it is.
      const FactsChange change = sequences_.postponed() ? captured.change_of_all(index) : captured.change(index);
      if (change.stale()) {
        found.stale = &variant;
        return true;
      }
      if (change.any()) {
        found.other = &variant;
        return false;
      }
    }
    if (sequence.has_to_wait()) {
      found.waiting = found.pending = &variant;
    } else if (of_other_order(variant)) {
      found.pending = &variant;
    } else if (const bool ready = sequence.pending().ready(index); ready && !of_other_chunk(variant)) {
      found.ready = &variant;
    } else {
      found.pending = &variant;
      ++found.busy;
      beside = ready && beside == nullptr ? &variant : beside;
    }
    return found.ready != nullptr;
  };
  std::vector<CallVariant>& all = call.site.variants.all;
  // An order has a capture for each microbatch. Most often one of the chunk's slot is ready, and no other is looked at.
  const auto may_be_ready = [&](const CallVariant& variant) {
    return variant.slot == *chunk->slot && variant.holder->sequence->pending().ready(variant.index());
  };
  if (chunk != nullptr && chunk->slot && std::any_of(all.begin(), all.end(), [&](CallVariant& variant) {
        return may_be_ready(variant) && ends_with(variant);
      })) {
    return found;
  }
  found = {};
  (void)std::any_of(all.begin(), all.end(), ends_with);
  if (refuses && found.ready == nullptr && beside != nullptr) {  // the backwards may still come in the captures' order
    found.ready = beside;
  }
  return found;
}

}  // namespace sidestream
