#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "analysis/copy_pace.h"
#include "analysis/copy_places.h"

namespace sidestream {

/// How far copies may be away from compute, as Options says: see Options::lag, lookahead and groups_in_flight. This class alone turns these
/// options into windows. Each window has room for the largest call or group, even if `lag` is smaller. If few calls or groups may be in
/// flight, the lag is not more than these take. Pure.
struct CopyLimits {
  /// What bounds the window of graphed calls, besides the bytes.
  struct Calls {
    std::optional<std::int64_t> side_streams;  ///< see GraphOptions
    std::vector<LayerPace> paces;              ///< by run; without times where the device keeps none
    std::optional<LinkPace> link;              ///< if it is known
  };

  std::optional<std::uint64_t> lag;
  std::optional<std::uint64_t> lookahead;
  std::size_t groups_in_flight = std::numeric_limits<std::size_t>::max();

  /// For a sequence of graphed calls whose runs save `bytes` that the options select.
  [[nodiscard]] CopyWindow for_calls(const SequenceOrder& order, const std::vector<std::uint64_t>& bytes,
                                     const Calls& calls) const;
  /// The smallest window, whatever the options say.
  [[nodiscard]] static CopyWindow smallest(const std::vector<std::uint64_t>& bytes);
  /// For eager groups that save `bytes`.
  [[nodiscard]] CopyWindow for_groups(const std::vector<std::uint64_t>& bytes) const;
  /// For eager groups in a step without a plan, of which the largest two so far save `largest_so_far`. Copies trail by no more than these
  /// two groups, even if `lag` allows more: a first step must fit on the device.
  [[nodiscard]] CopyWindow for_unplanned_groups(const std::vector<std::uint64_t>& largest_so_far) const;
  /// For the report, if `window` has a larger lag than the options: "... is smaller than `what`; ...". Else empty.
  [[nodiscard]] std::string note(const CopyWindow& window, const std::string& what) const;
};

}  // namespace sidestream
