#include "graphs/engine/step_memory.h"

namespace sidestream {

void StepMemory::begin(std::int64_t captures) {
  allocated_at_begin_ = runtime_->memory_stats().allocated;
  if (!measured_.stands || measured_.captures != captures) {
    measured_.captures = captures;
    measured_.allocated_at_begin = allocated_at_begin_;
    measurement_.emplace(*runtime_);
  } else {
    LiveMemory::of(runtime_->device()).mark(*runtime_);
  }
}

LiveMemory::Peak StepMemory::end() {
  if (measurement_) {
    measured_.peak = measurement_->peak();
    measured_.stands = true;
    measurement_.reset();
    return measured_.peak;
  }
  measured_.stands = runtime_->memory_stats().allocated_peak == measured_.peak.allocated &&
                     allocated_at_begin_ == measured_.allocated_at_begin;
  if (measured_.stands) {
    LiveMemory::of(runtime_->device()).tell_peak(measured_.peak.live);
  }
  return measured_.peak;
}

}  // namespace sidestream
