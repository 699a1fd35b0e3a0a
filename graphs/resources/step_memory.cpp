#include "graphs/resources/step_memory.h"

#include <algorithm>
#include <exception>

namespace sidestream {
namespace {

constexpr std::int64_t kFarthest = 64;
constexpr std::size_t kKept = 8;  ///< measured steps, of several shapes

}  // namespace

void StepMemory::begin(std::int64_t captures) {
  allocated_at_begin_ = runtime_->memory_stats().allocated;
  const bool captured = captures_ != captures;
  if (captured) {
    captures_ = captures;
    measured_.clear();
    distance_ = 0;
  }
  if (captured || (unknown_ && since_ >= distance_)) {
    distance_ = captured ? 0 : std::clamp<std::int64_t>(2 * distance_, 1, kFarthest);
    since_ = 0;
    measurement_.emplace(*runtime_);
  } else {
    LiveMemory::of(runtime_->device()).mark(*runtime_);
  }
}

LiveMemory::Peak StepMemory::end() {
  if (measurement_) {
    latest_ = measurement_->peak();
    measurement_.reset();
    if (Measured* const known = find_measured_with_peak(latest_.allocated)) {
      known->peak = latest_;
      return latest_;
    }
    if (measured_.size() == kKept) {
      measured_.erase(measured_.begin());
    }
    measured_.push_back({allocated_at_begin_, latest_});
    unknown_ = false;
    return latest_;
  }
  ++since_;
  if (const Measured* const known = find_measured_with_peak(runtime_->memory_stats().allocated_peak)) {
    distance_ = unknown_ ? distance_ : 0;
    latest_ = known->peak;
    LiveMemory::of(runtime_->device()).tell_peak(latest_.live);
  } else {
    unknown_ = true;
  }
  return latest_;
}

StepMemory::Measured* StepMemory::find_measured_with_peak(std::int64_t allocated_peak) {
  const auto known = std::find_if(measured_.begin(), measured_.end(), [&](const Measured& measured) {
    return measured.peak.allocated == allocated_peak && measured.allocated_at_begin == allocated_at_begin_;
  });
  return known == measured_.end() ? nullptr : &*known;
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

void EagerMemoryEstimate::close() noexcept {
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
