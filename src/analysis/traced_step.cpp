#include "analysis/traced_step.h"

#include <algorithm>
#include <map>

#include <nlohmann/json.hpp>

namespace sidestream {
namespace {

/// A row of the picture.
struct Lane {
  int number;
  const char* name;
};

constexpr Lane kLanes[] = {
    {1, "graphs"}, {2, "copies to the host"}, {3, "copies to the device"}, {4, "compute waits for copies"}};

Lane lane_of(SpanKind kind) {
  switch (kind) {
    case SpanKind::forward:
    case SpanKind::backward:
    case SpanKind::weights:
      return kLanes[0];
    case SpanKind::offload:
      return kLanes[1];
    case SpanKind::reload:
      return kLanes[2];
    case SpanKind::wait:
      break;
  }
  return kLanes[3];
}

const char* suffix_of(SpanKind kind) {
  return kind == SpanKind::forward    ? " forward"
         : kind == SpanKind::backward ? " backward"
         : kind == SpanKind::weights  ? " weight gradients"
                                      : "";
}

ChunkReport* chunk_of(const TracedSpan& span, Report& report) {
  const auto is_it = [&](const ChunkReport& chunk) {
    return chunk.stage == span.stage && chunk.microbatch == span.microbatch;
  };
  const auto found = std::find_if(report.chunks.begin(), report.chunks.end(), is_it);
  return found == report.chunks.end() ? nullptr : &*found;
}

}  // namespace

void add_times(const TracedStep& step, Report& report) {
  report.traced_step = step.number;
  report.traced_seconds = step.seconds;
  report.tracing_seconds = step.tracing;
  std::map<std::string, std::size_t> index;
  for (const TracedSpan& span : step.spans) {
    const auto [known, is_new] = index.emplace(span.name, report.times.size());
    if (is_new) {
      report.times.emplace_back().name = span.name;
    }
    TimesReport& times = report.times[known->second];
    ChunkReport none;
    ChunkReport* const found = chunk_of(span, report);
    ChunkReport& chunk = found == nullptr ? none : *found;
    const double seconds = step.timed ? span.end - span.begin : 0;
    switch (span.kind) {
      case SpanKind::forward:
        times.forward_seconds += seconds;
        break;
      case SpanKind::backward:
      case SpanKind::weights:
        times.backward_seconds += seconds;
        break;
      case SpanKind::offload:
        times.offload_seconds += seconds;
        times.offloaded_bytes += span.bytes;
        chunk.offload_seconds += seconds;
        report.offload_seconds += seconds;
        break;
      case SpanKind::reload:
        times.reload_seconds += seconds;
        times.reloaded_bytes += span.bytes;
        chunk.reload_seconds += seconds;
        report.reload_seconds += seconds;
        break;
      case SpanKind::wait:
        times.waited_seconds += seconds;
        chunk.waited_seconds += seconds;
        report.waited_seconds += seconds;
        break;
    }
  }
}

std::string chrome_trace(const TracedStep& step) {
  constexpr double kMicrosecond = 1e6;
  nlohmann::json events = nlohmann::json::array();
  const auto name = [&](const char* what, int lane, const std::string& value) {
    events.push_back({{"ph", "M"}, {"name", what}, {"pid", 1}, {"tid", lane}, {"args", {{"name", value}}}});
  };
  name("process_name", 0, "step " + std::to_string(step.number) + (step.timed ? "" : ", as the host queued it"));
  for (const Lane& lane : kLanes) {
    name("thread_name", lane.number, lane.name);
  }
  double begin = 0;  // copies may begin before the step does on the device
  for (const TracedSpan& span : step.spans) {
    begin = std::min(begin, span.begin);
  }
  for (const TracedSpan& span : step.spans) {
    nlohmann::json arguments = nlohmann::json::object();
    if (span.bytes > 0) {
      arguments["bytes"] = span.bytes;
    }
    if (span.stage >= 0) {
      arguments["stage"] = span.stage;
      arguments["microbatch"] = span.microbatch;
    }
    events.push_back({{"ph", "X"},
                      {"name", span.name + suffix_of(span.kind)},
                      {"pid", 1},
                      {"tid", lane_of(span.kind).number},
                      {"ts", kMicrosecond * (span.begin - begin)},
                      {"dur", kMicrosecond * std::max(0.0, span.end - span.begin)},
                      {"args", std::move(arguments)}});
  }
  for (const MemoryPoint& point : step.memory) {
    events.push_back({{"ph", "C"},
                      {"name", "live device memory"},
                      {"pid", 1},
                      {"tid", 0},
                      {"ts", kMicrosecond * (point.at - begin)},
                      {"args", {{"bytes", point.live}}}});
  }
  const nlohmann::json object = {{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}};
  // A user's name need not be valid text; invalid parts are replaced.
  return object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace sidestream
