#include "graphs/sequence/sequence_copies.h"

#include <algorithm>

#include "base/site.h"

namespace sidestream {

SequenceCopies::SequenceCopies(std::shared_ptr<Runtime> runtime, std::shared_ptr<GroupMover> mover,
                               CapturedCalls& calls, const SequenceOrder& order, const PendingRuns& pending,
                               const PendingRuns& weights)
    : runtime_(std::move(runtime)),
      mover_(std::move(mover)),
      calls_(calls),
      order_(order),
      pending_(pending),
      weights_(weights),
      for_weights_reloaded_(runtime_->create_event()) {
  for (CapturedCall& call : calls_) {
    call.copies.offloaded = runtime_->create_event();
    call.copies.reloaded = runtime_->create_event();
  }
  offloading_.reserve(calls_.size());
  reloading_.reserve(calls_.size());
  due_.reserve(calls_.size());
  with_copies_.reserve(calls_.size());
}

SequenceCopies::~SequenceCopies() { mover_->settle(); }

// A graph at or before a call's forward begins another pass. The order of the earlier pass is over: its memory may have other uses by now.
bool SequenceCopies::may_use_sources(std::size_t graph_index, std::size_t index) const {
  return graph_index <= order_.forward_index(index) || graph_index >= calls_[index].copies.released_at;
}

bool SequenceCopies::may_use_targets(std::size_t graph_index, std::size_t index) const {
  return graph_index < calls_[index].copies.reload_at || graph_index > order_.backward_index(index);
}

void SequenceCopies::await_others(std::size_t graph_index, c10::Stream stream) {
  for (const std::size_t call : offloading_) {
    if (may_use_sources(graph_index, call)) {
      mover_->await(stream, calls_[call].copies.offloaded);
    }
  }
  for (const Reload& reload : reloading_) {
    if (!reload.awaited && may_use_targets(graph_index, reload.call)) {
      mover_->await(stream, calls_[reload.call].copies.reloaded);
    }
  }
}

void SequenceCopies::forget_awaited(std::size_t graph_index) {
  std::erase_if(offloading_, [&](std::size_t call) { return may_use_sources(graph_index, call); });
  std::erase_if(reloading_, [&](const Reload& reload) { return graph_index < calls_[reload.call].copies.reload_at; });
  for (Reload& reload : reloading_) {
    reload.awaited = reload.awaited || may_use_targets(graph_index, reload.call);
  }
}

void SequenceCopies::before_forward(std::size_t index, c10::Stream side) {
  const std::size_t graph_index = order_.forward_index(index);
  await_others(graph_index, side);
  // The copy for a weights graph: no graph needs it, and this forward may offload to the slot that it reads.
  if (for_weights_ && !weights_.contains(*for_weights_)) {
    await_for_weights(side);
  }
  if (!found_) {
    find_calls_with_copies();
  }
  if (reload_before_[graph_index]) {
    queue_due_reloads(graph_index, side);
  }
}

void SequenceCopies::forward_launched(std::size_t index) {
  forget_awaited(order_.forward_index(index));
  const CapturedCopies& captured = calls_[index].copies.captured;
  if (captured.empty()) {
    return;
  }
  GroupMover::Copies copies = mover_->offload_copies();
  std::size_t next = 0;
  for (const CapturedCopies::Group& group : captured.groups) {
    const Site site(Activity::offload, group.site);
    for (const ExternalEvent& ready : group.ready) {
      copies.wait_for(ready);
    }
    for (; next < group.end; ++next) {
      const CapturedCopy& copy = captured.copies[next];
      copies.to_host(copy.host, copy.source, copy.bytes);
    }
    if (next == captured.copies.size()) {
      copies.record(calls_[index].copies.offloaded);
    }
  }
  copies.finish();
  offloading_.push_back(index);
}

bool SequenceCopies::is_on_device(std::size_t index) const {
  return std::any_of(reloading_.begin(), reloading_.end(), [&](const Reload& reload) { return reload.call == index; });
}

void SequenceCopies::find_calls_with_copies() {
  with_copies_.clear();
  reload_before_.assign(order_.size(), false);
  next_for_weights_.assign(calls_.size(), {});
  for (const std::size_t call : order_.by_backward()) {
    const CapturedCall::Copies& copies = calls_[call].copies;
    if (copies.captured.bytes > copies.captured.for_weights) {
      with_copies_.push_back(call);
      reload_before_[copies.reload_at] = !order_.is_backward(copies.reload_at);
    }
    const std::size_t own = order_.weights_rank(call);
    for (std::size_t rank = copies.weights_reload_at; copies.captured.for_weights > 0 && rank < own; ++rank) {
      std::optional<std::size_t>& next = next_for_weights_[rank];
      if (!next || own < order_.weights_rank(*next)) {
        next = call;  // if its backward has not run yet at an earlier rank
      }
    }
  }
  found_ = true;
}

void SequenceCopies::queue_due_reloads(std::size_t graph_index, c10::Stream side) {
  due_.clear();
  const auto comes_before = [&](std::size_t call, std::size_t graph) { return order_.backward_index(call) < graph; };
  for (auto next = std::lower_bound(with_copies_.begin(), with_copies_.end(), graph_index, comes_before);
       next != with_copies_.end(); ++next) {
    const bool own = order_.backward_index(*next) == graph_index;
    if (!own && may_use_targets(graph_index, *next)) {
      break;  // calls after it are reloaded later still
    }
    if ((own || pending_.contains(*next)) && !is_on_device(*next)) {
      due_.push_back(*next);
    }
  }
  if (due_.empty()) {
    return;
  }
  GroupMover::Copies copies = mover_->reload_copies();
  copies.wait_for(side);  // all work that has used the targets' memory, and the copies to the host
  for (const std::size_t call : due_) {
    const Site site(Activity::reload, calls_[call].site);
    const StepTrace::InChunk in_chunk(trace(), calls_[call].replay.chunk);
    for (const CapturedCopy& copy : calls_[call].copies.captured.copies) {
      if (!copy.for_weights) {
        copies.to_device(copy.target, copy.host, copy.bytes);
      }
    }
    copies.record(calls_[call].copies.reloaded);
  }
  copies.finish();
  for (const std::size_t call : due_) {
    reloading_.push_back({call});
  }
}

void SequenceCopies::before_backward(std::size_t index, c10::Stream side) {
  const std::size_t graph_index = order_.backward_index(index);
  await_others(graph_index, side);
  if (!found_) {
    find_calls_with_copies();
  }
  queue_due_reloads(graph_index, side);
  const CapturedCall& call = calls_[index];
  if (call.copies.captured.for_weights > 0 && call.weights.graph && weights_.empty() && !for_weights_) {
    queue_for_weights(index, side);  // no other weights graph comes before its own
  }
  if (!due_.empty() && due_.front() == index && calls_[index].copies.reload_at < graph_index) {
    mover_->count_inline_reload();
  }
  for (const Reload& reload : reloading_) {
    if (reload.call == index && !reload.awaited) {
      mover_->await(side, calls_[index].copies.reloaded);
    }
  }
}

void SequenceCopies::queue_for_weights(std::size_t index, c10::Stream side) {
  const CapturedCall& call = calls_[index];
  const StepTrace::InChunk in_chunk(trace(), call.replay.chunk);
  GroupMover::Copies copies = mover_->reload_copies();
  copies.wait_for(side);
  const Site site(Activity::reload, call.site);
  for (const CapturedCopy& copy : call.copies.captured.copies) {
    if (copy.for_weights) {
      copies.to_device(copy.target, copy.host, copy.bytes);
    }
  }
  copies.record(for_weights_reloaded_);
  copies.finish();
  for_weights_ = index;
}

void SequenceCopies::await_for_weights(c10::Stream side) {
  const StepTrace::InChunk in_chunk(trace(), calls_[*for_weights_].replay.chunk);
  mover_->await(side, for_weights_reloaded_);
  for_weights_.reset();
}

void SequenceCopies::before_weights(std::size_t index, c10::Stream side) {
  const std::size_t rank = order_.weights_rank(index);
  if (!found_) {
    find_calls_with_copies();
  }
  const bool is_back = for_weights_ == index;
  if (for_weights_) {
    const CapturedCall::Copies& queued = calls_[*for_weights_].copies;
    if (rank < queued.weights_reload_at || rank >= order_.weights_rank(*for_weights_)) {  // it may use these targets
      await_for_weights(side);
    }
  }
  if (!is_back && calls_[index].copies.captured.for_weights > 0) {
    if (for_weights_) {  // one event serves all
      await_for_weights(side);
    }
    queue_for_weights(index, side);
    mover_->count_inline_reload();
    await_for_weights(side);
  }
  if (const auto next = next_for_weights_[rank]; next && !for_weights_ && weights_.contains(*next)) {
    queue_for_weights(*next, side);
  }
}

void SequenceCopies::backward_launched(std::size_t index) {
  forget_awaited(order_.backward_index(index));
  for (Reload& reload : reloading_) {
    reload.awaited = reload.awaited || reload.call == index;
  }
}

void SequenceCopies::join(c10::Stream stream) {
  for (const std::size_t call : offloading_) {
    runtime_->wait(stream, calls_[call].copies.offloaded);
  }
  for (const Reload& reload : reloading_) {
    if (!reload.awaited) {
      runtime_->wait(stream, calls_[reload.call].copies.reloaded);
    }
  }
  if (for_weights_) {
    runtime_->wait(stream, for_weights_reloaded_);
  }
}

void SequenceCopies::reset(std::size_t index) {
  const auto is_it = [&](const Reload& reload) { return reload.call == index; };
  const bool for_weights = for_weights_ == index;
  if (std::erase(offloading_, index) + std::erase_if(reloading_, is_it) > 0 || for_weights) {
    mover_->settle();
  }
  if (for_weights) {
    for_weights_.reset();
  }
  calls_[index].copies = {};
  found_ = false;
}

}  // namespace sidestream
