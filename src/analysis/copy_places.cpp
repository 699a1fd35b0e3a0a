#include "analysis/copy_places.h"

#include <algorithm>
#include <map>

namespace sidestream {

std::vector<bool> needed_immediately(const SequenceOrder& order, const std::vector<std::uint64_t>& bytes,
                                     const CopyWindow& window) {
  std::vector<std::uint64_t> saved_before(order.size() + 1);  // bytes saved by forwards below each graph index
  for (std::size_t i = 0; i < order.size(); ++i) {
    saved_before[i + 1] = saved_before[i] + (order.is_backward(i) ? 0 : bytes[order.run_at(i)]);
  }
  std::vector<bool> stay(order.runs());
  for (std::size_t run = 0; run < order.runs(); ++run) {
    stay[run] = saved_before[order.backward_index(run)] - saved_before[order.forward_index(run)] <= window.lag;
  }
  return stay;
}

namespace {

/// The last run that has to be off the device at the backward at graph index `i`: the backward's own, or the one whose reload is due there.
std::size_t last_due(const SequenceOrder& order, std::size_t i) {
  const std::size_t run = order.run_at(i);
  const std::size_t next = order.backward_rank(run) + 1;
  const bool has_next = next < order.runs() && order.forward_index(order.by_backward()[next]) < i;
  return has_next ? std::max(run, order.by_backward()[next]) : run;
}

void place_releases(const SequenceOrder& order, const std::vector<std::uint64_t>& bytes,
                    const std::vector<std::uint64_t>& offloaded, const CopyWindow& window,
                    std::vector<CopyPlaces>& places) {
  std::uint64_t held = 0;
  std::size_t in_flight = 0;
  std::size_t oldest = 0;  // run that is not released
  std::size_t forwards = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::size_t run = order.run_at(i);
    const bool backward = order.is_backward(i);
    const std::uint64_t more = backward ? 0 : bytes[run];
    const std::size_t due = backward ? last_due(order, i) : 0;
    const auto must_go = [&] { return backward ? oldest <= due : held + more > window.lag; };
    for (; oldest < forwards && (in_flight > window.in_flight || must_go()); ++oldest) {
      places[oldest].released_at = i;
      held -= offloaded[oldest];
      in_flight -= offloaded[oldest] > 0 ? 1 : 0;
    }
    if (backward) {
      held -= bytes[run] - offloaded[run];
    } else {
      held += more;
      in_flight += offloaded[run] > 0 ? 1 : 0;
      ++forwards;
    }
  }
}

void place_reloads(const SequenceOrder& order, const std::vector<std::uint64_t>& bytes,
                   const std::vector<std::uint64_t>& offloaded, std::uint64_t room, std::vector<CopyPlaces>& places) {
  std::vector<std::uint64_t> released(order.size());  // bytes, by graph index
  for (std::size_t run = 0; run < order.runs(); ++run) {
    released[places[run].released_at] += offloaded[run];
  }
  std::uint64_t on_device = 0;  // of pending runs
  std::size_t next = 0;         // in the order of backwards: the first run that is not back
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::size_t run = order.run_at(i);
    on_device -= released[i];
    const bool backward = order.is_backward(i);
    // A forward takes half as long as a backward. A forward that frees more than it saves has to come first, or the peak were here.
    const bool forward_next = i + 1 < order.size() && !order.is_backward(i + 1);
    const std::size_t second = forward_next && bytes[order.run_at(i + 1)] >= released[i + 1] ? i + 2 : i + 1;
    if (!backward) {
      on_device += bytes[run];
    }
    for (; next < order.runs(); ++next) {
      const std::size_t candidate = order.by_backward()[next];
      const bool gone = order.forward_index(candidate) < i && places[candidate].released_at <= i;
      const bool due = backward ? next <= order.backward_rank(run) + 1 : order.backward_index(candidate) <= second;
      const bool has_room = backward && on_device + offloaded[candidate] <= room;
      if (!gone || (!due && !has_room)) {
        break;
      }
      places[candidate].reload_at = i;
      on_device += offloaded[candidate];
    }
    if (backward) {
      on_device -= bytes[run];
    }
  }
}

}  // namespace

std::vector<CopyPlaces> copy_places(const SequenceOrder& order, const std::vector<std::uint64_t>& bytes,
                                    const std::vector<std::uint64_t>& offloaded, const CopyWindow& window) {
  std::vector<CopyPlaces> places(order.runs());
  place_releases(order, bytes, offloaded, window, places);
  place_reloads(order, bytes, offloaded, window.room(), places);
  return places;
}

std::vector<std::size_t> former_runs(const SequenceOrder& order, const std::vector<std::size_t>& kinds,
                                     const std::vector<bool>& for_weights) {
  std::vector<std::vector<std::size_t>> ended(order.size() + 1);  // by graph index: runs that have ended before it
  for (const std::size_t run : order.by_backward()) {
    ended[for_weights[run] ? order.weights_index(run) : order.backward_index(run) + 1].push_back(run);
  }
  std::vector<std::size_t> former(order.runs());
  std::map<std::size_t, std::vector<std::size_t>> over;  // by kind: runs that have ended, and whose place no other has
  for (std::size_t i = 0; i < order.size(); ++i) {
    for (const std::size_t run : ended[i]) {
      over[kinds[run]].push_back(run);
    }
    if (order.is_backward(i)) {
      continue;
    }
    const std::size_t run = order.run_at(i);
    std::vector<std::size_t>& free = over[kinds[run]];
    if (free.empty()) {
      former[run] = run;
    } else {
      former[run] = free.back();
      free.pop_back();
    }
  }
  return former;
}

}  // namespace sidestream
