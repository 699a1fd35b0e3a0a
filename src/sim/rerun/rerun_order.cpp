#include "sim/rerun/rerun_order.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "sim/device/issue_order.h"

namespace sidestream::sim {
namespace {

constexpr c10::StreamId no_queue = std::numeric_limits<c10::StreamId>::min();

// Far apart, so that one direction nearly always goes before another: uniform weights miss the faults that need that.
constexpr double weight_levels[] = {0.002, 0.05, 1, 20, 500};

}  // namespace

RerunOrder::RerunOrder(const Schedule& schedule, const std::vector<RecordedWork>& works)
    : schedule_(schedule), works_(works), random_(schedule.number()) {
  if (works.empty()) {
    return;
  }
  if (schedule_.kind() == Schedule::Kind::starve) {
    QueueNumbers numbers;
    const auto found = std::find_if(works.begin(), works.end(), [&](const RecordedWork& recorded) {
      return numbers.number(recorded.queue) == schedule_.number();
    });
    starved_ = found != works.end() ? found->queue : no_queue;
    return;
  }
  if (schedule_.kind() != Schedule::Kind::seed) {
    return;
  }
  by_stream_ = random_() % 2 == 0;
  if (by_stream_) {
    for (std::size_t changes = random_() % 4; changes > 0; --changes) {
      redraws_.push_back(random_() % works.size());
    }
  } else if (random_() % 4 != 0) {
    for (double& weight : weights_) {
      weight = weight_levels[random_() % std::size(weight_levels)];
    }
  }
}

int RerunOrder::rank(std::uint32_t candidate) const noexcept {
  const std::size_t way = direction_of(works_[candidate].work->kind);
  switch (schedule_.kind()) {
    case Schedule::Kind::early:
      return way == 0 ? 0 : 1;
    case Schedule::Kind::late:
      return way == 0 ? 1 : 0;
    case Schedule::Kind::d2h_early:
      return way == 1 ? 2 : way == 0 ? 1 : 0;
    case Schedule::Kind::d2h_late:
      return way == 2 ? 2 : way == 0 ? 1 : 0;
    case Schedule::Kind::seed:
      return 0;
    case Schedule::Kind::starve:
      return works_[candidate].queue == starved_ ? 0 : 1;
    case Schedule::Kind::hold:
      return candidate == schedule_.number() ? 0 : 1;
  }
  return 0;
}

std::uint64_t RerunOrder::priority(c10::StreamId queue) {
  const auto found = priorities_.find(queue);
  return found != priorities_.end() ? found->second : priorities_.emplace(queue, random_()).first->second;
}

std::size_t RerunOrder::choose(const std::vector<std::uint32_t>& ready) {
  if (std::find(redraws_.begin(), redraws_.end(), finished_) != redraws_.end()) {
    priorities_.clear();
  }
  ++finished_;
  if (schedule_.kind() == Schedule::Kind::seed && !by_stream_) {
    double total = 0;
    for (const std::uint32_t candidate : ready) {
      total += weights_[direction_of(works_[candidate].work->kind)];
    }
    double left = std::uniform_real_distribution<double>(0, total)(random_);
    std::size_t chosen = 0;
    while (chosen + 1 < ready.size() && (left -= weights_[direction_of(works_[ready[chosen]].work->kind)]) >= 0) {
      ++chosen;
    }
    return chosen;
  }
  const auto key = [&](std::uint32_t candidate) {
    return by_stream_ ? priority(works_[candidate].queue) : static_cast<std::uint64_t>(rank(candidate));
  };
  std::size_t chosen = 0;
  std::uint64_t best = key(ready[0]);
  for (std::size_t i = 1; i < ready.size(); ++i) {
    const std::uint64_t value = key(ready[i]);
    if (value > best || (value == best && ready[i] < ready[chosen])) {
      chosen = i;
      best = value;
    }
  }
  return chosen;
}

}  // namespace sidestream::sim
