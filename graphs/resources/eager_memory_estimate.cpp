#include "graphs/resources/eager_memory_estimate.h"

#include <algorithm>
#include <exception>

namespace sidestream {

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
