#include "offload/step_trace.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <unordered_map>
#include <utility>

#include "base/site.h"

namespace sidestream {
namespace {

double host_clock() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Adds its life to a sum.
class OwnTime {
 public:
  explicit OwnTime(std::atomic<double>& sum) : sum_(sum) {}
  OwnTime(const OwnTime&) = delete;
  OwnTime& operator=(const OwnTime&) = delete;
  ~OwnTime() { sum_.fetch_add(host_clock() - begin_, std::memory_order_relaxed); }

 private:
  std::atomic<double>& sum_;
  double begin_ = host_clock();
};

std::string name_here() {
  const Site* const site = Site::innermost();
  return std::string(site == nullptr || site->name().empty() ? "(no scope)" : site->name());
}

}  // namespace

void StepTrace::Span::start(StepTrace& trace, SpanKind kind, c10::Stream stream, const char* name) {
  const OwnTime own(trace.own_);
  name_ = name != nullptr ? name : name_here();
  begin_ = trace.mark(stream);
  kind_ = kind;
  stream_ = stream;
  trace_ = &trace;
}

void StepTrace::Span::finish(std::int64_t bytes) {
  StepTrace& trace = *std::exchange(trace_, nullptr);
  const OwnTime own(trace.own_);
  Mark end = trace.mark(*stream_);
  const std::lock_guard lock(trace.mutex_);
  if (trace.segment_) {  // else the step has ended
    trace.traced_.push_back(
        {{kind_, std::move(name_), 0, 0, bytes}, *stream_, std::move(begin_), std::move(end), trace.chunk()});
  }
}

StepTrace::Graph::Graph(StepTrace& trace, SpanKind kind, c10::Stream side)
    : trace_(trace.on() ? &trace : nullptr), kind_(kind), side_(side) {
  if (trace_ != nullptr) {
    const OwnTime own(trace_->own_);
    begin_ = trace_->mark(side_);
  }
}

void StepTrace::Graph::launched(const void* owner, std::size_t graph_index) {
  if (trace_ == nullptr) {
    return;
  }
  const OwnTime own(trace_->own_);
  Mark end = trace_->mark(side_);
  const std::lock_guard lock(trace_->mutex_);
  if (trace_->segment_) {
    trace_->begin_point(begin_);
    trace_->traced_.push_back({{kind_, name_here()},
                               side_,
                               begin_,
                               std::move(end),
                               trace_->chunk(),
                               owner,
                               graph_index,
                               trace_->points_.size() - 1});
  }
}

void StepTrace::Graph::counted() {
  if (trace_ == nullptr) {
    return;
  }
  const OwnTime own(trace_->own_);
  const std::lock_guard lock(trace_->mutex_);
  const auto is_graph = [](const Traced& traced) { return traced.owner != nullptr; };
  const auto latest = std::find_if(trace_->traced_.rbegin(), trace_->traced_.rend(), is_graph);
  if (trace_->segment_ && latest != trace_->traced_.rend()) {
    trace_->begin_point(latest->end);
  }
}

void StepTrace::step_begins(std::int64_t captures, bool wanted) {
  steps_ = captures == captures_ ? steps_ + 1 : 0;
  captures_ = captures;
  if (steps_ != 1 && !wanted) {
    return;
  }
  const std::lock_guard lock(mutex_);
  if (!resolved_) {  // while this step runs, the one before is the latest
    resolve();
  }
  traced_.clear();
  points_.clear();
  own_ = 0;
  segment_.reset();
  began_ = host_clock();
  const OwnTime own(own_);
  try {
    begin_ = mark(runtime_->current_stream());
    begin_point(begin_);
    on_ = true;
  } catch (const std::exception&) {  // a step needs no trace
    segment_.reset();
    points_.clear();
  }
}

bool StepTrace::step_ended(std::int64_t number, const std::function<void(std::uint64_t, TracedSpan&)>& describe) {
  if (!on()) {
    return false;
  }
  const double ending = host_clock();
  try {
    end_ = mark(runtime_->current_stream());
    const std::lock_guard lock(mutex_);
    begin_point(end_);
  } catch (const std::exception&) {  // a step needs no trace
    step_failed();
    return false;
  }
  on_ = false;
  const std::lock_guard lock(mutex_);
  segment_.reset();
  points_.back().live = points_[points_.size() - 2].live;
  for (Traced& traced : traced_) {
    if (traced.chunk != 0) {
      describe(traced.chunk, traced.span);
    }
  }
  resolved_ = false;
  step_ = {};
  step_.number = number;
  step_.tracing = own_ + host_clock() - ending;
  return true;
}

void StepTrace::step_failed() noexcept {
  if (on_.exchange(false)) {
    const std::lock_guard lock(mutex_);
    segment_.reset();
    traced_.clear();
    points_.clear();
    steps_ = 0;  // the next step is traced in its place
  }
}

StepTrace::Mark StepTrace::mark(c10::Stream stream) const {
  Mark mark{nullptr, host_clock() - began_};
  if (runtime_->keeps_time()) {
    auto event = std::make_shared<Event>(runtime_->create_event(EventTiming::on));
    runtime_->record(*event, stream);
    mark.event = std::move(event);
  }
  return mark;
}

void StepTrace::look(c10::Stream stream) {
  const OwnTime own(own_);
  const Mark here = mark(stream);
  const std::lock_guard lock(mutex_);
  if (segment_) {
    begin_point(here);
  }
}

void StepTrace::begin_point(const Mark& at) {
  if (segment_) {
    points_.back().live = segment_->peak().live;
  }
  segment_.emplace(*runtime_);
  points_.push_back({at, 0});
}

double StepTrace::seconds_at(const Mark& mark) const {
  constexpr double kMillisecond = 1e-3;
  if (mark.event == nullptr) {
    return mark.issued;
  }
  runtime_->synchronize(*mark.event);  // its stream may be one that the step's end does not follow
  return runtime_->elapsed_ms(*begin_.event, *mark.event) * kMillisecond;
}

void StepTrace::resolve() {
  resolved_ = true;
  try {
    step_.timed = runtime_->keeps_time();
    step_.seconds = step_.timed ? seconds_at(end_) : 0;
    for (Traced& traced : traced_) {
      traced.span.begin = seconds_at(traced.begin);
      traced.span.end = seconds_at(traced.end);
      traced.begin = traced.end = {};
      step_.spans.push_back(traced.span);
    }
    for (Point& point : points_) {
      step_.memory.push_back({seconds_at(point.at), point.live});
      point.at = {};
    }
  } catch (const std::exception&) {  // the device has failed, and all that uses it says so
    step_ = {};
    traced_.clear();
    points_.clear();
  }
  begin_ = end_ = {};
}

const TracedStep& StepTrace::step() {
  const std::lock_guard lock(mutex_);
  if (!resolved_) {
    resolve();
  }
  return step_;
}

StepTrace::Launches StepTrace::launches() {
  (void)step();
  const std::lock_guard lock(mutex_);
  Launches result;
  std::size_t point = 0;
  const auto peak_until = [&](std::size_t end) {
    std::int64_t peak = 0;
    for (; point < end; ++point) {
      peak = std::max(peak, points_[point].live);
    }
    return peak;
  };
  const auto close = [&](std::size_t end) {
    (result.launches.empty() ? result.peak_before : result.launches.back().after) = peak_until(end);
  };
  const auto seconds_of = [&](const Traced& traced) { return step_.timed ? traced.span.end - traced.span.begin : 0; };
  std::unordered_map<c10::Stream, double> waited;  // the waits of eager code are on another stream
  for (const Traced& traced : traced_) {
    if (traced.span.kind == SpanKind::wait) {
      waited[traced.stream] += seconds_of(traced);
    } else if (traced.owner != nullptr) {
      close(traced.point);
      result.launches.push_back({traced.owner, traced.graph_index, peak_until(traced.point + 1), 0,
                                 std::exchange(waited[traced.stream], 0), seconds_of(traced)});
    }
  }
  close(points_.size());
  return result;
}

}  // namespace sidestream
