#include "analysis/copy_limits.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace sidestream {
namespace {

/// How many of the largest calls or groups set the lag if no option does.
constexpr std::size_t kDeep = 2;

/// Bytes of the `count` largest.
std::uint64_t largest(std::vector<std::uint64_t> bytes, std::size_t count) {
  std::sort(bytes.begin(), bytes.end(), std::greater<>());
  bytes.resize(std::min(bytes.size(), count));
  return std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0});
}

}  // namespace

CopyWindow CopyLimits::for_calls(const SequenceOrder& order, const std::vector<std::uint64_t>& bytes,
                                 const Calls& calls) const {
  const std::size_t deep = calls.side_streams ? static_cast<std::size_t>(*calls.side_streams) : kDeep;
  CopyWindow window{std::max(lag.value_or(largest(bytes, deep)), largest(bytes, 1)), lookahead.value_or(0),
                    groups_in_flight};
  const bool timed =
      std::all_of(calls.paces.begin(), calls.paces.end(), [](const LayerPace& pace) { return pace.forward > 0; });
  if (calls.link && timed) {
    const CopyWindow paced = paced_window(order, bytes, window, calls.paces, *calls.link);
    window.lag = lag || calls.side_streams ? window.lag : paced.lag;
    window.lookahead = lookahead ? window.lookahead : paced.lookahead;
  }
  if (groups_in_flight < bytes.size()) {
    window.lag = std::min(window.lag, largest(bytes, groups_in_flight + 1));  // and the call that runs
  }
  return window;
}

CopyWindow CopyLimits::smallest(const std::vector<std::uint64_t>& bytes) { return {largest(bytes, 1), 0}; }

CopyWindow CopyLimits::for_groups(const std::vector<std::uint64_t>& bytes) const {
  const std::uint64_t most = largest(bytes, std::max<std::size_t>(groups_in_flight, 1));
  return {std::min(std::max(lag.value_or(largest(bytes, kDeep)), largest(bytes, 1)), most), lookahead.value_or(0),
          groups_in_flight};
}

CopyWindow CopyLimits::for_unplanned_groups(const std::vector<std::uint64_t>& largest_so_far) const {
  CopyLimits limits = *this;
  limits.lag = std::min(lag.value_or(largest(largest_so_far, kDeep)), largest(largest_so_far, kDeep));
  limits.lookahead = 0;
  return limits.for_groups(largest_so_far);
}

std::string CopyLimits::note(const CopyWindow& window, const std::string& what) const {
  return lag && *lag < window.lag ? "Options::lag of " + std::to_string(*lag) + " bytes is smaller than " + what +
                                        "; " + std::to_string(window.lag) + " bytes are used instead"
                                  : "";
}

}  // namespace sidestream
