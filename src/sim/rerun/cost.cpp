#include "sim/rerun/cost.h"

#include <algorithm>
#include <array>
#include <queue>

#include <sidestream/error.h>

namespace sidestream::sim {
namespace {

enum Engine : std::size_t { compute_engine, to_host_engine, to_device_engine, no_engine };

Engine engine_of(const Work& work) {
  switch (work.kind) {
    case Work::Kind::compute:
      return compute_engine;
    case Work::Kind::copy_to_host:
      return to_host_engine;
    case Work::Kind::copy_to_device:
      return to_device_engine;
    case Work::Kind::poison:
    case Work::Kind::event_record:
    case Work::Kind::event_wait:
      return no_engine;
  }
  return no_engine;
}

double bytes_of(const Work& work, bool writes_only) {
  double bytes = 0;
  for (const Access& access : work.accesses) {
    bytes += access.write || !writes_only ? static_cast<double>(access.bytes) : 0;
  }
  return bytes;
}

double seconds_of(const Work& work, const Cost& cost) {
  switch (engine_of(work)) {
    case compute_engine:
      return cost.compute ? cost.compute(work) : bytes_of(work, false) / cost.memory_bandwidth;
    case to_host_engine:
      return bytes_of(work, true) / cost.to_host_bandwidth;
    case to_device_engine:
      return bytes_of(work, true) / cost.to_device_bandwidth;
    case no_engine:
      return 0;
  }
  return 0;
}

struct Ready {
  double since;
  std::uint32_t work;
  bool operator>(const Ready& other) const noexcept {
    return since != other.since ? since > other.since : work > other.work;
  }
};

using ReadyQueue = std::priority_queue<Ready, std::vector<Ready>, std::greater<>>;

}  // namespace

Simulation simulate(const std::vector<RecordedWork>& works, const Cost& cost) {
  if (!(cost.to_host_bandwidth > 0) || !(cost.to_device_bandwidth > 0) || !(cost.memory_bandwidth > 0)) {
    throw UsageError("sim cost: a bandwidth is not positive; give bytes per second");
  }
  std::vector<std::uint32_t> missing(works.size());
  std::vector<std::vector<std::uint32_t>> followers(works.size());
  for (std::uint32_t i = 0; i < works.size(); ++i) {
    missing[i] = static_cast<std::uint32_t>(works[i].after.size());
    for (const std::uint32_t before : works[i].after) {
      followers[before].push_back(i);
    }
  }
  std::array<ReadyQueue, no_engine + 1> ready;
  std::array<double, no_engine + 1> free_at{};
  const auto enqueue = [&](std::uint32_t work, double since) {
    ready[engine_of(*works[work].work)].push({since, work});
  };
  for (std::uint32_t i = 0; i < works.size(); ++i) {
    if (missing[i] == 0) {
      enqueue(i, 0);
    }
  }
  Simulation result;
  result.spans.resize(works.size());
  for (std::size_t finished = 0; finished < works.size(); ++finished) {
    // The engine whose next work starts first: what becomes ready later cannot start before that.
    std::size_t first = no_engine;
    double begin = 0;
    bool found = false;
    for (std::size_t engine = 0; engine < ready.size(); ++engine) {
      if (ready[engine].empty()) {
        continue;
      }
      const double start = std::max(ready[engine].top().since, free_at[engine]);
      if (!found || start < begin) {
        found = true;
        first = engine;
        begin = start;
      }
    }
    const std::uint32_t next = ready[first].top().work;
    ready[first].pop();
    const double seconds = seconds_of(*works[next].work, cost);
    const double end = begin + seconds;
    result.spans[next] = {begin, end};
    result.seconds = std::max(result.seconds, end);
    if (first == compute_engine) {
      result.compute_seconds += seconds;
    } else {
      result.copy_seconds += seconds;
    }
    if (first != no_engine) {
      free_at[first] = end;
    }
    for (const std::uint32_t follower : followers[next]) {
      if (--missing[follower] == 0) {
        double since = 0;
        for (const std::uint32_t before : works[follower].after) {
          since = std::max(since, result.spans[before].end);
        }
        enqueue(follower, since);
      }
    }
  }
  return result;
}

}  // namespace sidestream::sim
