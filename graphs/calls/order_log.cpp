#include "graphs/calls/order_log.h"

#include <algorithm>
#include <optional>

#include <torch/csrc/autograd/graph_task.h>

namespace sidestream {

SequenceStep OrderLog::forward(std::size_t call, const std::vector<std::size_t>& from) {
  const std::lock_guard lock(mutex_);
  runs_.resize(std::max(runs_.size(), call + 1));
  const std::size_t microbatch = runs_[call]++;
  order_.steps.push_back({call, microbatch, Direction::forward});
  for (const std::size_t earlier : from) {
    order_.connected.emplace_back(earlier, call);
  }
  return {call, microbatch, Direction::backward};
}

void OrderLog::ran(std::size_t call, bool forward_only) {
  const std::lock_guard lock(mutex_);
  if (!forward_only) {
    std::erase(order_.forward_only, call);
  } else if (runs_[call] == 1) {
    order_.forward_only.push_back(call);
  }
}

void OrderLog::forget(const SequenceStep& backward) {
  const std::lock_guard lock(mutex_);
  std::erase(order_.steps, SequenceStep{backward.call, backward.microbatch, Direction::forward});
  if (backward.microbatch == 0) {  // the call itself goes, and another one will have its number
    std::erase_if(order_.connected, [&](const auto& pair) { return pair.second == backward.call; });
    runs_[backward.call] = 0;
  }
}

void OrderLog::backward(const SequenceStep& step) {
  const std::int64_t pass = torch::autograd::get_current_graph_task_id();
  const std::lock_guard lock(mutex_);
  order_.steps.push_back(step);
  if (pass >= 0) {
    const std::size_t first = first_in_pass_.try_emplace(pass, step.call).first->second;
    order_.connected.emplace_back(first, step.call);
  }
}

void OrderLog::weights(const std::vector<SequenceStep>& backwards) {
  const std::lock_guard lock(mutex_);
  std::vector<SequenceStep> weights;
  for (const SequenceStep& step : order_.steps) {
    if (std::find(backwards.begin(), backwards.end(), step) != backwards.end()) {
      weights.push_back({step.call, step.microbatch, Direction::weights});
    }
  }
  order_.steps.insert(order_.steps.end(), weights.begin(), weights.end());
}

RecordedOrder OrderLog::part_of(const std::vector<std::size_t>& among) const {
  const auto number_of = [&](std::size_t call) -> std::optional<std::size_t> {
    const auto found = std::lower_bound(among.begin(), among.end(), call);
    return found != among.end() && *found == call ? std::optional<std::size_t>(found - among.begin()) : std::nullopt;
  };
  RecordedOrder part;
  {
    const std::lock_guard lock(mutex_);
    for (const SequenceStep& step : order_.steps) {
      if (const auto number = number_of(step.call)) {
        part.steps.push_back({*number, step.microbatch, step.direction});
      }
    }
    for (const auto& [a, b] : order_.connected) {
      if (const auto first = number_of(a), second = number_of(b); first && second) {
        part.connected.emplace_back(*first, *second);
      }
    }
    for (const std::size_t call : order_.forward_only) {
      if (const auto number = number_of(call)) {
        part.forward_only.push_back(*number);
      }
    }
  }
  return part;
}

std::vector<std::vector<std::size_t>> OrderLog::groups(const std::vector<std::size_t>& among) const {
  return sequence_groups(among.size(), part_of(among));
}

std::vector<bool> OrderLog::with_backward(std::size_t calls) const {
  std::vector<bool> ran(calls);
  const std::lock_guard lock(mutex_);
  for (const SequenceStep& step : order_.steps) {
    if (step.direction == Direction::backward && step.microbatch == 0) {
      ran[step.call] = true;
    }
  }
  return ran;
}

std::vector<bool> OrderLog::without_backward(std::size_t calls) const {
  std::vector<std::size_t> left(calls);
  std::vector<bool> without(calls);
  const std::lock_guard lock(mutex_);
  for (const SequenceStep& step : order_.steps) {
    if (step.direction != Direction::weights) {
      left[step.call] += step.direction == Direction::forward ? 1 : -1;
    }
  }
  std::transform(left.begin(), left.end(), without.begin(), [](std::size_t runs) { return runs > 0; });
  return without;
}

SequenceOrder OrderLog::order_of(const std::vector<std::size_t>& among) const {
  return sequence_in_order(part_of(among));
}

}  // namespace sidestream
