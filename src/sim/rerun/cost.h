#pragma once
#include <functional>
#include <vector>

#include "sim/rerun/recording.h"

namespace sidestream::sim {

/// What a recorded step would cost on a device with one compute engine and one copy engine per direction.
struct Cost {
  double to_host_bandwidth = 55.4e9;    ///< bytes a second
  double to_device_bandwidth = 55.5e9;  ///< bytes a second
  /// Seconds of an operator; empty: the bytes it reads and writes at `memory_bandwidth`.
  std::function<double(const Work&)> compute;
  double memory_bandwidth = 4e12;  ///< bytes a second
};

/// When a piece of work runs, in seconds from the start of the step.
struct Span {
  double begin = 0;
  double end = 0;
};

struct Simulation {
  std::vector<Span> spans;     ///< one for each piece of recorded work
  double seconds = 0;          ///< of the whole step
  double compute_seconds = 0;  ///< the sum over all operators
  double copy_seconds = 0;     ///< the sum over all copies, both directions
};

/// Runs a recording on a virtual clock: each engine takes what could start first, in issue order among equals. Nothing is
/// computed. Threads: any. Throws: UsageError for a bandwidth that is not positive.
[[nodiscard]] Simulation simulate(const std::vector<RecordedWork>& works, const Cost& cost);

}  // namespace sidestream::sim
