#include "analysis/copy_places.h"

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

void place_releases(const SequenceOrder& order, const std::vector<std::uint64_t>& bytes,
                    const std::vector<std::uint64_t>& offloaded, std::uint64_t lag, std::vector<CopyPlaces>& places) {
  std::uint64_t held = 0;
  std::size_t oldest = 0;  // run that is not released
  std::size_t forwards = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::size_t run = order.run_at(i);
    const bool backward = order.is_backward(i);
    const std::uint64_t more = backward ? 0 : bytes[run];
    for (; oldest < forwards && (backward || held + more > lag); ++oldest) {
      places[oldest].released_at = i;
      held -= offloaded[oldest];
    }
    if (backward) {
      held -= bytes[run] - offloaded[run];
    } else {
      held += more;
      ++forwards;
    }
  }
}

void place_reloads(const SequenceOrder& order, const std::vector<std::uint64_t>& bytes,
                   const std::vector<std::uint64_t>& offloaded, std::uint64_t room, std::vector<CopyPlaces>& places) {
  std::uint64_t on_device = 0;  // of pending runs, as reloads begin
  std::size_t next = 0;         // in the order of backwards: the first run that is not back
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::size_t run = order.run_at(i);
    if (!order.is_backward(i)) {
      on_device += bytes[run] - offloaded[run];
      continue;
    }
    const std::size_t rank = order.backward_rank(run);
    for (; next < order.runs(); ++next) {
      const std::size_t candidate = order.by_backward()[next];
      const bool saved = order.forward_index(candidate) < i;
      const bool due = next <= rank + 1;
      if (!saved || (!due && on_device + offloaded[candidate] > room)) {
        break;
      }
      places[candidate].reload_at = i;
      on_device += offloaded[candidate];
    }
    on_device -= bytes[run];
  }
}

}  // namespace

std::vector<CopyPlaces> copy_places(const SequenceOrder& order, const std::vector<std::uint64_t>& bytes,
                                    const std::vector<std::uint64_t>& offloaded, const CopyWindow& window) {
  std::vector<CopyPlaces> places(order.runs());
  place_releases(order, bytes, offloaded, window.lag, places);
  place_reloads(order, bytes, offloaded, window.lag + window.lookahead, places);
  return places;
}

}  // namespace sidestream
