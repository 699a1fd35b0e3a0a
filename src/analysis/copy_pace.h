#pragma once
#include <cstdint>
#include <vector>

#include "analysis/copy_clock.h"
#include "analysis/copy_places.h"

namespace sidestream {

/// Seconds that the work of one layer takes.
struct LayerPace {
  double forward = 0;
  double backward = 0;
};

/// Seconds that a pass over `order` takes, for runs that save `bytes` and offload `offloaded` of them, bit by bit as their forward runs.
/// Each graph waits for copies as copy_places says. `bytes`, `offloaded` and `paces` by run. Pure.
[[nodiscard]] double pass_seconds(const SequenceOrder& order, const std::vector<std::uint64_t>& bytes,
                                  const std::vector<std::uint64_t>& offloaded, const CopyWindow& window,
                                  const std::vector<LayerPace>& paces, const LinkPace& link);

/// The window if the options leave it open, no less than `least`. The lag is the smallest one with which forwards wait for copies to the
/// host as little as with half of all bytes, if that is little. The lookahead is the smallest one that gains as much as an eighth of the
/// bytes would. If half of the bytes is not enough for the lag, a larger lag would only offload less. Pure.
[[nodiscard]] CopyWindow paced_window(const SequenceOrder& order, const std::vector<std::uint64_t>& bytes,
                                      const CopyWindow& least, const std::vector<LayerPace>& paces,
                                      const LinkPace& link);

}  // namespace sidestream
