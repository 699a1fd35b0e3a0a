#include "analysis/sequence_order.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "sidestream/error.h"

namespace sidestream {
namespace {

std::string describe(const SequenceStep& step) {
  const char* const graph = step.direction == Direction::forward    ? "the forward"
                            : step.direction == Direction::backward ? "the backward"
                                                                    : "the weight gradients";
  return graph + (" of call " + std::to_string(step.call)) + " for microbatch " + std::to_string(step.microbatch);
}

/// By run of `order`.
template <class Index>
std::vector<std::size_t> of_runs(const SequenceOrder& order, const Index& index) {
  std::vector<std::size_t> all;
  for (std::size_t run = 0; run < order.runs(); ++run) {
    all.push_back(index(run));
  }
  return all;
}

}  // namespace

SequenceOrder::SequenceOrder(std::vector<SequenceStep> steps) {
  const std::size_t none = steps.size();
  std::map<std::pair<std::size_t, std::size_t>, std::size_t> runs;
  for (const SequenceStep& step : steps) {
    const std::size_t i = steps_.size();
    const auto [run, is_new] = runs.try_emplace({step.call, step.microbatch}, forwards_.size());
    if (is_new != (step.direction == Direction::forward)) {
      throw UsageError("an order of graphs has " + describe(step) +
                       (is_new ? " without a forward before it" : " twice"));
    }
    if (step.direction == Direction::weights) {
      if (backwards_[run->second] == none || weights_[run->second] != none) {
        throw UsageError("an order of graphs has " + describe(step) +
                         (backwards_[run->second] == none ? " without a backward before it" : " twice"));
      }
      weights_[run->second] = i;
      by_weights_.push_back(run->second);
      continue;
    }
    steps_.push_back(step);
    run_of_.push_back(run->second);
    if (is_new) {
      forwards_.push_back(i);
      backwards_.push_back(none);
      backward_rank_.push_back(0);
      weights_.push_back(none);
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
  for (const std::size_t run : by_backward_) {
    if (weights_[run] == none) {
      weights_[run] = size();
      by_weights_.push_back(run);
    }
  }
  weights_rank_.resize(this->runs());
  for (std::size_t rank = 0; rank < this->runs(); ++rank) {
    weights_rank_[by_weights_[rank]] = rank;
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
  auto weights = by_weights_.begin();
  for (std::size_t i = 0; i < size(); ++i) {
    for (; weights_[*weights] <= i; ++weights) {  // ends: the run of the last graph has none before it
      if (!dropped[*weights]) {
        steps.push_back({call[*weights], 0, Direction::weights});
      }
    }
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

PendingRuns::Indices::Indices(std::vector<std::size_t> by_run)
    : of(std::move(by_run)), runs(of.size()), rank(of.size()) {
  std::iota(runs.begin(), runs.end(), 0);
  std::stable_sort(runs.begin(), runs.end(), [this](std::size_t a, std::size_t b) { return of[a] < of[b]; });
  for (std::size_t i = 0; i < runs.size(); ++i) {
    rank[runs[i]] = i;
  }
}

PendingRuns::PendingRuns(Indices begins, Indices ends)
    : begins_(std::move(begins)), ends_(std::move(ends)), pending_(begins_.of.size()) {}

PendingRuns::PendingRuns(const SequenceOrder& order)
    : PendingRuns(Indices(of_runs(order, [&](std::size_t run) { return order.forward_index(run); })),
                  Indices(of_runs(order, [&](std::size_t run) { return order.backward_index(run); }))) {}

PendingRuns PendingRuns::of_weights(const SequenceOrder& order) {
  return PendingRuns(Indices(of_runs(order, [&](std::size_t run) { return order.backward_index(run); })),
                     Indices(of_runs(order, [&](std::size_t run) { return order.weights_index(run) - 1; })));
}

void PendingRuns::begin(std::size_t run) {
  if (pending_[run]) {
    return;
  }
  latest_ = count_ == 0 ? begins_.rank[run] : std::max(latest_, begins_.rank[run]);
  due_ = count_ == 0 ? ends_.rank[run] : std::min(due_, ends_.rank[run]);
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
  while (!pending_[begins_.runs[latest_]]) {
    --latest_;
  }
  while (!pending_[ends_.runs[due_]]) {
    ++due_;
  }
}

std::optional<std::size_t> PendingRuns::obstacle(std::size_t graph_index) const {
  if (count_ == 0) {
    return std::nullopt;
  }
  if (begins_.of[latest()] >= graph_index) {
    return latest();
  }
  const std::size_t due = ends_.runs[due_];
  return ends_.of[due] < graph_index ? std::optional(due) : std::nullopt;
}

}  // namespace sidestream
