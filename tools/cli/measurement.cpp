#include "tools/cli/measurement.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <utility>

#include "sidestream/device.h"

namespace sidestream::cli {
namespace {

double median(std::vector<double> values) {
  if (values.empty()) {
    return 0;
  }
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

Measurement::Measurement(const TrainingOptions& options, c10::Device device, std::string name)
    : device_(device), first_steps_(first_steps(options)) {
  result_.name = std::move(name);
  release_cached_memory(device_);
  reset_memory_peaks(device_);
}

void Measurement::step(TrainingRun& run, double& loss, const std::function<void()>& with_gradients) {
  const auto begin = std::chrono::steady_clock::now();
  loss = run.step(with_gradients);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const MemoryUse use = memory_use(device_);
  if (++steps_ > first_steps_) {
    seconds_.push_back(seconds);
    result_.live = std::max(result_.live, use.live_peak);
    result_.allocated = std::max(result_.allocated, use.allocated_peak);
    result_.reserved = std::max(result_.reserved, use.reserved_peak);
    return;
  }
  result_.first_reserved = std::max(result_.first_reserved, use.reserved_peak);
  if (steps_ == first_steps_) {
    release_cached_memory(device_);
    reset_memory_peaks(device_);
  }
}

ModeResult Measurement::finish(const TrainingRun& run) {
  result_.steps = static_cast<std::int64_t>(seconds_.size());
  result_.step_seconds = median(seconds_);
  result_.offload = run.offload_numbers();
  result_.trace = run.trace();
  return result_;
}

}  // namespace sidestream::cli
