#include "graphs/sequence/step_trace.h"

#include <algorithm>
#include <utility>

namespace sidestream {
namespace {

constexpr double kMillisecond = 1e-3;

Event timed_mark(Runtime& runtime, c10::Stream stream) {
  if (!runtime.keeps_time()) {
    return {};
  }
  Event event = runtime.create_event(EventTiming::on);
  runtime.record(event, stream);
  return event;
}

}  // namespace

StepTrace::Graph::Graph(StepTrace* trace, c10::Stream side)
    : trace_(trace != nullptr && trace->on_.load(std::memory_order_relaxed) ? trace : nullptr), side_(side) {
  if (trace_ != nullptr) {
    begin_ = timed_mark(*trace_->runtime_, side_);
  }
}

void StepTrace::Graph::waits_queued() {
  if (trace_ != nullptr) {
    ready_ = timed_mark(*trace_->runtime_, side_);
  }
}

void StepTrace::Graph::launched(const GraphSequence& sequence, std::size_t graph_index) {
  if (trace_ == nullptr) {
    return;
  }
  Event done = timed_mark(*trace_->runtime_, side_);
  const std::lock_guard lock(trace_->mutex_);
  if (trace_->segment_) {  // else the step has ended
    const std::int64_t peak = trace_->close_segment();
    (trace_->timed_.empty() ? trace_->peak_before_ : trace_->timed_.back().launch.after) = peak;
    trace_->timed_.push_back({{&sequence, graph_index}, std::move(begin_), std::move(ready_), std::move(done)});
  }
}

void StepTrace::Graph::counted() {
  if (trace_ == nullptr) {
    return;
  }
  const std::lock_guard lock(trace_->mutex_);
  if (trace_->segment_ && !trace_->timed_.empty()) {
    trace_->timed_.back().launch.during = trace_->close_segment();
  }
}

void StepTrace::begin() {
  const std::lock_guard lock(mutex_);
  timed_.clear();
  peak_before_ = 0;
  seconds_ = 0;
  segment_.emplace(*runtime_);
  begin_ = timed_mark(*runtime_, runtime_->current_stream());
  on_ = true;
}

void StepTrace::end() {
  const std::lock_guard lock(mutex_);
  on_ = false;
  const std::int64_t peak = close_segment();
  (timed_.empty() ? peak_before_ : timed_.back().launch.after) = peak;
  segment_.reset();
  end_ = timed_mark(*runtime_, runtime_->current_stream());
}

void StepTrace::abandon() noexcept {
  const std::lock_guard lock(mutex_);
  on_ = false;
  segment_.reset();
  timed_.clear();
}

std::int64_t StepTrace::close_segment() {
  const std::int64_t peak = segment_->peak().live;
  segment_.emplace(*runtime_);
  return peak;
}

std::vector<StepTrace::Launch> StepTrace::launches() {
  const std::lock_guard lock(mutex_);
  if (runtime_->keeps_time()) {
    runtime_->synchronize(end_);
    seconds_ = runtime_->elapsed_ms(begin_, end_) * kMillisecond;
  }
  std::vector<Launch> launches;
  for (Timed& timed : timed_) {
    if (runtime_->keeps_time()) {
      runtime_->synchronize(timed.done);  // its stream may be no one's that the step's end follows
      timed.launch.waited = runtime_->elapsed_ms(timed.begin, timed.ready) * kMillisecond;
      timed.launch.ran = runtime_->elapsed_ms(timed.ready, timed.done) * kMillisecond;
    }
    launches.push_back(timed.launch);
  }
  timed_.clear();
  return launches;
}

}  // namespace sidestream
