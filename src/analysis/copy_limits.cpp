#include "analysis/copy_limits.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace sidestream {
namespace {

/// How many of the largest calls or groups set the lag if no option does.
constexpr std::size_t kDeep = 2;

CopyWindow window_of(std::vector<std::uint64_t> bytes, std::optional<std::uint64_t> lag, std::uint64_t lookahead,
                     std::size_t deep, std::size_t in_flight = std::numeric_limits<std::size_t>::max()) {
  std::sort(bytes.begin(), bytes.end(), std::greater<>());
  const std::uint64_t least = bytes.empty() ? 0 : bytes.front();
  bytes.resize(std::min(bytes.size(), deep));
  const std::uint64_t together = std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0});
  return {std::max(least, lag.value_or(together)), lookahead, in_flight};
}

}  // namespace

CopyWindow CopyLimits::for_calls(const SequenceOrder& order, const std::vector<std::uint64_t>& bytes,
                                 const Calls& calls) const {
  const std::size_t deep = calls.side_streams ? static_cast<std::size_t>(*calls.side_streams) : kDeep;
  CopyWindow window = window_of(bytes, lag, lookahead.value_or(0), deep, groups_in_flight);
  const bool timed =
      std::all_of(calls.paces.begin(), calls.paces.end(), [](const LayerPace& pace) { return pace.forward > 0; });
  if (calls.link && timed) {
    const CopyWindow paced = paced_window(order, bytes, window, calls.paces, *calls.link);
    window.lag = lag || calls.side_streams ? window.lag : paced.lag;
    window.lookahead = lookahead ? window.lookahead : paced.lookahead;
  }
  return window;
}

CopyWindow CopyLimits::smallest(const std::vector<std::uint64_t>& bytes) { return window_of(bytes, 0, 0, 1); }

CopyWindow CopyLimits::for_groups(const std::vector<std::uint64_t>& bytes) const {
  return window_of(bytes, lag, lookahead.value_or(0), kDeep, groups_in_flight);
}

CopyWindow CopyLimits::for_unplanned_groups(const std::vector<std::uint64_t>& largest) const {
  const std::uint64_t most = window_of(largest, std::nullopt, 0, kDeep).lag;
  return window_of(largest, std::min(lag.value_or(most), most), 0, kDeep, groups_in_flight);
}

std::string CopyLimits::note(const CopyWindow& window, const std::string& what) const {
  return lag && *lag < window.lag ? "Options::lag of " + std::to_string(*lag) + " bytes is smaller than " + what +
                                        "; " + std::to_string(window.lag) + " bytes are used instead"
                                  : "";
}

}  // namespace sidestream
