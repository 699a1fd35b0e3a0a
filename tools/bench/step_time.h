#pragma once
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <iterator>
#include <utility>
#include <vector>

#include <c10/core/Device.h>

#include "sidestream/device.h"

namespace sidestream::bench {

inline double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// Of all threads of the process so far.
inline double cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// Of the calling thread so far.
inline double thread_cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// Calls `run(i)` in each round for each `i` below `modes`. Each round starts one further than the round before: none is always first.
template <class Run>
void in_turns(std::size_t modes, std::int64_t rounds, const Run& run) {
  for (std::int64_t round = 0; round < rounds; ++round) {
    for (std::size_t turn = 0; turn < modes; ++turn) {
      run((turn + static_cast<std::size_t>(round)) % modes);
    }
  }
}

/// 0 for none.
inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

struct StepTime {
  double wall = 0;    ///< until the device is idle, seconds
  double issued = 0;  ///< until the host had issued everything, seconds
  double cpu = 0;     ///< what all threads of the process computed until then, seconds
};

/// Of `run`, which issues `steps` steps: of one of them. The device is idle when it begins.
template <class Run>
StepTime time_of(c10::Device device, const Run& run, std::int64_t steps = 1) {
  synchronize(device);
  const auto begin = std::chrono::steady_clock::now();
  const double cpu_before = cpu_seconds();
  run();
  const auto of_one = [&](double seconds) { return seconds / static_cast<double>(steps); };
  StepTime time{.issued = of_one(seconds_since(begin)), .cpu = of_one(cpu_seconds() - cpu_before)};
  synchronize(device);
  time.wall = of_one(seconds_since(begin));
  return time;
}

/// Of each field by itself.
inline StepTime median(const std::vector<StepTime>& times) {
  const auto of = [&](double StepTime::*field) {
    std::vector<double> values;
    std::transform(times.begin(), times.end(), std::back_inserter(values),
                   [&](const StepTime& time) { return time.*field; });
    return median(std::move(values));
  };
  return {.wall = of(&StepTime::wall), .issued = of(&StepTime::issued), .cpu = of(&StepTime::cpu)};
}

}  // namespace sidestream::bench
