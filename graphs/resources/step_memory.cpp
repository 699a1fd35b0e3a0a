#include "graphs/resources/step_memory.h"

#include <algorithm>
#include <exception>

namespace sidestream {
namespace {

constexpr std::int64_t kFarthest = 64;

}  // namespace

void StepMemory::begin(std::int64_t captures) {
  allocated_at_begin_ = runtime_->memory_stats().allocated;
  const bool captured = measured_.captures != captures;
  if (captured || (!measured_.stands && since_ >= distance_)) {
    distance_ = captured ? 0 : std::clamp<std::int64_t>(2 * distance_, 1, kFarthest);
    since_ = 0;
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
    distance_ = 0;
    LiveMemory::of(runtime_->device()).tell_peak(measured_.peak.live);
  } else {
    ++since_;
  }
  return measured_.peak;
}

void EagerMemoryEstimate::step_begins() {
  const std::lock_guard lock(mutex_);
  counting_ = true;
  bytes_ = 0;
  look();
}

void EagerMemoryEstimate::call_begins() {
  const std::lock_guard lock(mutex_);
  if (measurement_) {
    bytes_ = std::max(bytes_, measurement_->peak().live - live_at_begin_);
    measurement_.reset();
  }
}

void EagerMemoryEstimate::call_ends() {
  const std::lock_guard lock(mutex_);
  if (counting_) {
    look();
  }
}

void EagerMemoryEstimate::look() {
  live_at_begin_ = LiveMemory::of(runtime_->device()).use(*runtime_).live;
  measurement_.emplace(*runtime_);
}

void EagerMemoryEstimate::backward_begins() noexcept { step_ends(); }

void EagerMemoryEstimate::step_ends() noexcept {
  try {
    call_begins();
  } catch (const std::exception&) {  // the device has failed: the count is kept as it is
  }
  const std::lock_guard lock(mutex_);
  counting_ = false;
  measurement_.reset();
}

std::int64_t EagerMemoryEstimate::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

}  // namespace sidestream
