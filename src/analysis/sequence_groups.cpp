#include "analysis/sequence_groups.h"

#include <algorithm>
#include <numeric>
#include <set>

namespace sidestream {
namespace {

/// Disjoint sets of calls; a set's root is its first call.
class Components {
 public:
  explicit Components(std::size_t calls) : parents_(calls) { std::iota(parents_.begin(), parents_.end(), 0); }
  [[nodiscard]] std::size_t root(std::size_t call) {
    while (parents_[call] != call) {
      call = parents_[call] = parents_[parents_[call]];
    }
    return call;
  }
  void join(std::size_t a, std::size_t b) {
    a = root(a);
    b = root(b);
    parents_[std::max(a, b)] = std::min(a, b);
  }

 private:
  std::vector<std::size_t> parents_;
};

/// Whether a sequence of `calls` in nested order may replay `steps`.
bool may_repeat(const std::vector<std::size_t>& calls, const std::vector<SequenceStep>& steps) {
  const SequenceOrder order = nested_order(calls.size());
  PendingRuns pending(order);
  for (const SequenceStep& step : steps) {
    const auto found = std::lower_bound(calls.begin(), calls.end(), step.call);
    if (found == calls.end() || *found != step.call || step.direction == Direction::weights) {
      continue;
    }
    const auto run = static_cast<std::size_t>(found - calls.begin());
    const bool forward = step.direction == Direction::forward;
    if (pending.obstacle(forward ? order.forward_index(run) : order.backward_index(run))) {
      return false;
    }
    if (forward) {
      pending.begin(run);
    } else {
      pending.end(run);
    }
  }
  return true;
}

/// Runs without a backward are left out: nothing waits for them.
std::vector<SequenceStep> whole_runs(const std::vector<SequenceStep>& steps) {
  std::set<std::pair<std::size_t, std::size_t>> ended;
  for (const SequenceStep& step : steps) {
    if (step.direction == Direction::backward) {
      ended.emplace(step.call, step.microbatch);
    }
  }
  std::vector<SequenceStep> whole;
  std::copy_if(steps.begin(), steps.end(), std::back_inserter(whole), [&](const SequenceStep& step) {
    return ended.count({step.call, step.microbatch}) != 0;
  });
  return whole;
}

}  // namespace

std::vector<std::vector<std::size_t>> sequence_groups(std::size_t calls, const RecordedOrder& recorded) {
  const std::vector<SequenceStep> steps = whole_runs(recorded.steps);
  std::vector<bool> forward_only(calls);
  for (const std::size_t call : recorded.forward_only) {
    forward_only[call] = true;
  }
  Components components(calls);
  for (const auto& [a, b] : recorded.connected) {
    components.join(a, b);
  }
  const auto first =
      static_cast<std::size_t>(std::find(forward_only.begin(), forward_only.end(), false) - forward_only.begin());
  for (std::size_t call = 0; call < calls; ++call) {
    if (forward_only[call]) {
      components.join(call, call > first ? call - 1 : std::min(first, calls - 1));
    }
  }
  std::vector<std::vector<std::size_t>> members(calls);
  for (std::size_t call = 0; call < calls; ++call) {
    members[components.root(call)].push_back(call);
  }
  std::vector<std::vector<std::size_t>> groups;
  for (const std::vector<std::size_t>& together : members) {
    if (together.empty() || may_repeat(together, steps)) {
      if (!together.empty()) {
        groups.push_back(together);
      }
      continue;
    }
    std::vector<std::size_t> group;
    for (const std::size_t call : together) {
      group.push_back(call);
      if (!may_repeat(group, steps)) {
        group.pop_back();
        groups.push_back(std::move(group));
        group = {call};
      }
    }
    groups.push_back(std::move(group));
  }
  std::sort(groups.begin(), groups.end());
  return groups;
}

SequenceOrder sequence_in_order(const RecordedOrder& recorded) {
  std::vector<SequenceStep> steps;
  std::copy_if(recorded.steps.begin(), recorded.steps.end(), std::back_inserter(steps),
               [](const SequenceStep& step) { return step.microbatch == 0; });
  return SequenceOrder(std::move(steps));
}

}  // namespace sidestream
