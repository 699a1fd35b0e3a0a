#include "sim/device/order.h"

#include <algorithm>
#include <limits>

#include "sim/rerun/recording.h"

namespace sidestream::sim {
namespace {

// Which weight a piece of work has: everything that is no copy counts as compute.
std::size_t direction(Work::Kind kind) {
  switch (kind) {
    case Work::Kind::copy_to_host:
      return 1;
    case Work::Kind::copy_to_device:
      return 2;
    case Work::Kind::compute:
    case Work::Kind::poison:
    case Work::Kind::event_record:
    case Work::Kind::event_wait:
      return 0;
  }
  return 0;
}

constexpr c10::StreamId no_queue = std::numeric_limits<c10::StreamId>::min();

constexpr double eagerness_levels[] = {0, 0.01, 0.1, 0.5, 1};
// Far apart, so that one direction nearly always goes before another: uniform weights miss the faults that need that.
constexpr double weight_levels[] = {0.002, 0.05, 1, 20, 500};

template <std::size_t count>
double draw(std::mt19937_64& random, const double (&levels)[count]) {
  return levels[random() % count];
}

}  // namespace

IssueOrder::IssueOrder(const Schedule& schedule) : schedule_(schedule), random_(schedule.number()) {
  by_stream_ = random_() % 2 == 0;
  for (double& value : by_kind_) {
    value = draw(random_, eagerness_levels);
  }
}

double IssueOrder::eagerness(Work::Kind kind, c10::StreamId queue) {
  if (!by_stream_) {
    return by_kind_[direction(kind)];
  }
  const auto found = of_queue_.find(queue);
  return found != of_queue_.end() ? found->second
                                  : of_queue_.emplace(queue, draw(random_, eagerness_levels)).first->second;
}

bool IssueOrder::runs_at_issue(Work::Kind kind, c10::StreamId queue) {
  switch (schedule_.kind()) {
    case Schedule::Kind::early:
      return true;
    case Schedule::Kind::late:
      return false;
    case Schedule::Kind::d2h_early:
      return kind == Work::Kind::copy_to_host;
    case Schedule::Kind::d2h_late:
      return kind == Work::Kind::copy_to_device;
    case Schedule::Kind::seed:
      return runs_unforced(kind, queue);
    case Schedule::Kind::starve:
      return queues_.number(queue) != schedule_.number();
    case Schedule::Kind::hold:
      return issued_++ != schedule_.number();
  }
  return true;
}

bool IssueOrder::runs_unforced(Work::Kind kind, c10::StreamId queue) {
  const double likely = eagerness(kind, queue);
  return likely > 0 && std::uniform_real_distribution<double>(0, 1)(random_) < likely;
}

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
      weight = draw(random_, weight_levels);
    }
  }
}

int RerunOrder::rank(std::uint32_t candidate) const noexcept {
  const std::size_t way = direction(works_[candidate].work->kind);
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
      total += weights_[direction(works_[candidate].work->kind)];
    }
    double left = std::uniform_real_distribution<double>(0, total)(random_);
    std::size_t chosen = 0;
    while (chosen + 1 < ready.size() && (left -= weights_[direction(works_[ready[chosen]].work->kind)]) >= 0) {
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
