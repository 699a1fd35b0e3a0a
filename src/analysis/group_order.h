#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "analysis/copy_places.h"

namespace sidestream {

/// What happens to the groups of an eager step, in order: a group's scope ends, and backward asks for the first of its storages.
struct GroupEvent {
  enum class Kind : std::uint8_t { ended, used };
  std::uint32_t group = 0;
  Kind kind = Kind::ended;

  friend bool operator==(const GroupEvent&, const GroupEvent&) = default;
};

/// Of one group, in device bytes.
struct GroupBytes {
  std::uint64_t held =
      0;  ///< that count into the lag from its end on: what leaves, and what turns round within the lag
  std::uint64_t leaving = 0;  ///< that leave

  friend bool operator==(const GroupBytes&, const GroupBytes&) = default;
};

/// How far eager copies may be away from compute.
struct GroupWindow {
  CopyWindow copies;
  std::size_t groups = std::numeric_limits<std::size_t>::max();  ///< as many may trail, beside the bytes

  friend bool operator==(const GroupWindow&, const GroupWindow&) = default;
};

/// The groups whose first use comes before they would be let go of: they need not leave. The latest group to end before a use
/// is one of them where it is used next, however few `window.groups` are. `bytes[g]`: what group g saves. Pure.
[[nodiscard]] std::vector<bool> needed_immediately_within(const std::vector<GroupEvent>& order,
                                                          const std::vector<std::uint64_t>& bytes,
                                                          const GroupWindow& window);

/// A group's copies back may begin behind an event of the order.
struct GroupReturn {
  std::size_t event = 0;
  std::uint32_t group = 0;
};

/// When the groups of a step that goes as `order` come back, by event, and by first use among those of one event: as early as they
/// find room beside what else is on the device then and until their use (`lag` and `lookahead` together), and a group's forward
/// or backward before that use at the latest. Pure.
[[nodiscard]] std::vector<GroupReturn> group_returns(const std::vector<GroupEvent>& order,
                                                     const std::vector<GroupBytes>& groups, const GroupWindow& window);

}  // namespace sidestream
