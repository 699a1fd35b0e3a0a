#include "analysis/sequence_order.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "sidestream/error.h"

namespace sidestream {
namespace {

std::string describe(const SequenceStep& step) {
  return std::string(step.direction == Direction::forward ? "the forward" : "the backward") + " of call " +
         std::to_string(step.call) + " for microbatch " + std::to_string(step.microbatch);
}

}  // namespace

SequenceOrder::SequenceOrder(std::vector<SequenceStep> steps) : steps_(std::move(steps)), run_of_(steps_.size()) {
  const std::size_t none = steps_.size();
  std::map<std::pair<std::size_t, std::size_t>, std::size_t> runs;
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    const SequenceStep& step = steps_[i];
    const auto [run, is_new] = runs.try_emplace({step.call, step.microbatch}, forwards_.size());
    if (is_new != (step.direction == Direction::forward)) {
      throw UsageError("an order of graphs has " + describe(step) +
                       (is_new ? " without a forward before it" : " twice"));
    }
    run_of_[i] = run->second;
    if (is_new) {
      forwards_.push_back(i);
      backwards_.push_back(none);
      backward_rank_.push_back(0);
    } else if (backwards_[run->second] != none) {
      throw UsageError("an order of graphs has " + describe(step) + " twice");
    } else {
      backwards_[run->second] = i;
      backward_rank_[run->second] = by_backward_.size();
      by_backward_.push_back(run->second);
    }
  }
  for (const auto& [key, run] : runs) {
    if (backwards_[run] == none) {
      throw UsageError("an order of graphs lacks " + describe({key.first, key.second, Direction::backward}));
    }
  }
}

std::size_t SequenceOrder::first_run_from(std::size_t graph_index) const {
  return static_cast<std::size_t>(std::lower_bound(forwards_.begin(), forwards_.end(), graph_index) -
                                  forwards_.begin());
}

bool SequenceOrder::interleaves() const {
  return !by_backward_.empty() && backwards_[by_backward_.front()] < forwards_.back();
}

SequenceOrder SequenceOrder::without(const std::vector<bool>& dropped) const {
  std::vector<std::size_t> call(runs());
  std::size_t left = 0;
  for (std::size_t run = 0; run < runs(); ++run) {
    call[run] = left;
    left += dropped[run] ? 0 : 1;
  }
  std::vector<SequenceStep> steps;
  for (std::size_t i = 0; i < size(); ++i) {
    if (!dropped[run_at(i)]) {
      steps.push_back({call[run_at(i)], 0, steps_[i].direction});
    }
  }
  return SequenceOrder(std::move(steps));
}

SequenceOrder nested_order(std::size_t calls) {
  std::vector<SequenceStep> steps;
  for (std::size_t call = 0; call < calls; ++call) {
    steps.push_back({call, 0, Direction::forward});
  }
  for (std::size_t call = calls; call-- > 0;) {
    steps.push_back({call, 0, Direction::backward});
  }
  return SequenceOrder(std::move(steps));
}

PendingRuns::PendingRuns(const SequenceOrder& order) : order_(&order), pending_(order.runs()) {}

void PendingRuns::begin(std::size_t run) {
  if (pending_[run]) {
    return;
  }
  const std::size_t rank = order_->backward_rank(run);
  latest_ = count_ == 0 ? run : std::max(latest_, run);
  due_ = count_ == 0 ? rank : std::min(due_, rank);
  pending_[run] = true;
  ++count_;
}

void PendingRuns::end(std::size_t run) noexcept {
  if (!pending_[run]) {
    return;
  }
  pending_[run] = false;
  if (--count_ == 0) {
    return;
  }
  while (!pending_[latest_]) {
    --latest_;
  }
  while (!pending_[order_->by_backward()[due_]]) {
    ++due_;
  }
}

std::optional<std::size_t> PendingRuns::obstacle(std::size_t graph_index) const {
  if (count_ == 0) {
    return std::nullopt;
  }
  if (order_->forward_index(latest_) >= graph_index) {
    return latest_;
  }
  const std::size_t due = order_->by_backward()[due_];
  return order_->backward_index(due) < graph_index ? std::optional(due) : std::nullopt;
}

}  // namespace sidestream
