#include "runtime/live_memory.h"

#include <algorithm>
#include <utility>

#include "runtime/each_device.h"

namespace sidestream {

LiveMemory& LiveMemory::of(c10::Device device) {
  return of_device<LiveMemory>(device, [] { return new LiveMemory(); });
}

void LiveMemory::add(const Change& by) noexcept {
  hidden_.fetch_add(by.hidden, std::memory_order_relaxed);
  in_flight_.fetch_add(by.in_flight, std::memory_order_relaxed);
}

void LiveMemory::raise_peaks(std::int64_t live, std::int64_t in_flight) {
  live_peak_ = std::max(live_peak_, live);
  for (Measurement* const measurement : measurements_) {
    Peak& peak = measurement->peak_;
    if (live > peak.live) {
      peak.live = live;
      peak.in_flight = in_flight;
    }
  }
}

std::int64_t LiveMemory::close(Runtime& runtime) {
  const MemoryStats stats = runtime.memory_stats();
  allocated_peak_ = std::max(allocated_peak_, stats.allocated_peak);
  reserved_peak_ = std::max(reserved_peak_, stats.reserved_peak);
  const bool whole = !changed_.exchange(false, std::memory_order_relaxed);
  raise_peaks((whole ? stats.allocated_peak : stats.allocated) + hidden_, in_flight_);
  for (Measurement* const measurement : measurements_) {
    measurement->peak_.allocated = std::max(measurement->peak_.allocated, stats.allocated_peak);
  }
  runtime.reset_peak_memory_stats();
  return stats.allocated;
}

void LiveMemory::change(Runtime& runtime, const Change& by) {
  if (!measured_.load(std::memory_order_relaxed)) [[likely]] {
    add(by);
    changed_.store(true, std::memory_order_relaxed);
    return;
  }
  const std::lock_guard lock(mutex_);
  const std::int64_t allocated = close(runtime);
  add(by);
  raise_peaks(allocated + hidden_, in_flight_);
}

void LiveMemory::launched(Runtime& runtime, const Change& during, const Change& after) {
  if (!measured_.load(std::memory_order_relaxed)) [[likely]] {
    add(after);
    changed_.store(true, std::memory_order_relaxed);
    return;
  }
  const std::lock_guard lock(mutex_);
  const std::int64_t live = close(runtime) + hidden_ + during.hidden;
  raise_peaks(live, in_flight_ + during.in_flight);
  add(after);
}

LiveMemory::Use LiveMemory::use(Runtime& runtime) {
  const std::lock_guard lock(mutex_);
  Use use{runtime.memory_stats(), 0, 0};
  MemoryStats& stats = use.allocator;
  use.live = stats.allocated + hidden_;
  use.live_peak = std::max(live_peak_, use.live);
  if (!changed_.load(std::memory_order_relaxed)) {
    use.live_peak = std::max(use.live_peak, stats.allocated_peak + hidden_);
  }
  stats.allocated_peak = std::max(stats.allocated_peak, allocated_peak_);
  stats.reserved_peak = std::max(stats.reserved_peak, reserved_peak_);
  return use;
}

void LiveMemory::restart(Runtime& runtime) {
  const std::lock_guard lock(mutex_);
  close(runtime);
  allocated_peak_ = reserved_peak_ = live_peak_ = 0;
}

void LiveMemory::mark(Runtime& runtime) {
  const std::lock_guard lock(mutex_);
  close(runtime);
}

void LiveMemory::tell_peak(std::int64_t live) {
  const std::lock_guard lock(mutex_);
  live_peak_ = std::max(live_peak_, live);
}

LiveMemory::Measurement::Measurement(Runtime& runtime) : memory_(of(runtime.device())), runtime_(runtime) {
  const std::lock_guard lock(memory_.mutex_);
  memory_.close(runtime_);
  memory_.measurements_.push_back(this);
  memory_.measured_ = true;
}

LiveMemory::Measurement::~Measurement() {
  const std::lock_guard lock(memory_.mutex_);
  auto& all = memory_.measurements_;
  all.erase(std::find(all.begin(), all.end(), this));
  memory_.measured_ = !all.empty();
}

LiveMemory::Peak LiveMemory::Measurement::peak() {
  const std::lock_guard lock(memory_.mutex_);
  memory_.close(runtime_);
  return peak_;
}

}  // namespace sidestream
