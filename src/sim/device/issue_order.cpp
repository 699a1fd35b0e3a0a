#include "sim/device/issue_order.h"

#include <iterator>

namespace sidestream::sim {
namespace {

constexpr double eagerness_levels[] = {0, 0.01, 0.1, 0.5, 1};

double draw_eagerness(std::mt19937_64& random) { return eagerness_levels[random() % std::size(eagerness_levels)]; }

}  // namespace

std::size_t direction_of(Work::Kind kind) noexcept {
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

IssueOrder::IssueOrder(const Schedule& schedule) : schedule_(schedule), random_(schedule.number()) {
  by_stream_ = random_() % 2 == 0;
  for (double& value : by_kind_) {
    value = draw_eagerness(random_);
  }
}

double IssueOrder::eagerness(Work::Kind kind, c10::StreamId queue) {
  if (!by_stream_) {
    return by_kind_[direction_of(kind)];
  }
  const auto found = of_queue_.find(queue);
  return found != of_queue_.end() ? found->second : of_queue_.emplace(queue, draw_eagerness(random_)).first->second;
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

}  // namespace sidestream::sim
