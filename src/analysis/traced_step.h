#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "sidestream/report.h"

namespace sidestream {

enum class SpanKind : std::uint8_t { forward, backward, weights, offload, reload, wait };

/// Something that took time on the device: a graph, the copies of one group, or compute that stood still until copies were done.
struct TracedSpan {
  SpanKind kind = SpanKind::forward;
  std::string name;              ///< of the call or group
  double begin = 0;              ///< seconds since the step began
  double end = 0;                ///< likewise
  std::int64_t bytes = 0;        ///< of copies
  std::int64_t stage = -1;       ///< of its chunk; -1: it belongs to none
  std::int64_t microbatch = -1;  ///< likewise
};

/// The peak of live device bytes from this moment until the next such moment.
struct MemoryPoint {
  double at = 0;  ///< seconds since the step began
  std::int64_t live = 0;
};

/// What one step did on the device, and when. Plain data.
struct TracedStep {
  std::int64_t number = 0;  ///< counts the engine's steps from 1; 0: none was traced
  bool timed = false;       ///< by the device. Else all times are those at which the host queued the work.
  double seconds = 0;       ///< from its begin to its end; 0 if it was not timed
  double tracing = 0;       ///< seconds that the host took to trace it
  std::vector<TracedSpan> spans;
  std::vector<MemoryPoint> memory;
};

/// Adds what the step says about times to `report`: totals, by name, and by chunk. Times are 0 if it was not timed. Pure.
void add_times(const TracedStep& step, Report& report);

/// The step in the Trace Event Format, which Perfetto and chrome://tracing read. Pure.
[[nodiscard]] std::string chrome_trace(const TracedStep& step);

}  // namespace sidestream
