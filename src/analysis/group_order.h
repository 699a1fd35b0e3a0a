#pragma once
#include <cstddef>
#include <cstdint>
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
  std::uint64_t held = 0;  ///< that count into the lag from its end on: offloaded bytes, and bytes needed immediately
  std::uint64_t offloaded = 0;

  friend bool operator==(const GroupBytes&, const GroupBytes&) = default;
};

/// The groups whose first use comes before their sources would be freed: they need not be offloaded. If the latest group to end before a
/// use is used next, it is one of them, however few `window.in_flight` are. `bytes[g]`: the bytes that group g saves. Pure.
[[nodiscard]] std::vector<bool> needed_immediately_within(const std::vector<GroupEvent>& order,
                                                          const std::vector<std::uint64_t>& bytes,
                                                          const CopyWindow& window);

/// The reload of a group may begin after an event of the order.
struct GroupReload {
  std::size_t event = 0;
  std::uint32_t group = 0;
};

/// When the groups of a step with this `order` are reloaded, by event, and by first use among those of one event. A reload starts as
/// early as it finds room, from then until the group's use, besides the rest on the device (`lag` and `lookahead` together). It starts at
/// the latest one group's forward or backward before that use. Pure.
[[nodiscard]] std::vector<GroupReload> group_reloads(const std::vector<GroupEvent>& order,
                                                     const std::vector<GroupBytes>& groups, const CopyWindow& window);

}  // namespace sidestream
