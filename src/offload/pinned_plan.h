#pragma once
#include <cstddef>
#include <vector>

#include "analysis/planner.h"
#include "memory/host_arena.h"
#include "memory/shared_slots.h"
#include "sidestream/progress.h"

namespace sidestream {

/// Plans `profile` for the room that `arena` has, pins for what is offloaded, and seals the arena. Where the system refuses to pin
/// although the cap has room, it is asked again group by group, in the plan's order; groups that get no memory stay, and the
/// plan's notes say so. `surplus`: see HostArena::prepare. `progress`, if any, hears of it if anything is offloaded.
/// `shared`: if it is not null, what is offloaded goes there, and is pinned and leased as far as that has no room: a slot a group.
/// `slots`: where it is not null, sizes of slots, the largest first, that are to be there too, as far as the cap has room for both; it
/// becomes the sizes that are there for this plan. Not beside `shared`.
/// Capture: illegal.  Throws: what `progress` throws; nothing is pinned then.
[[nodiscard]] Plan plan_and_pin(const Profile& profile, HostArena& arena, HostArena::Surplus surplus,
                                const ProgressCallback& progress = {}, SharedSlots::Share* shared = nullptr,
                                std::vector<std::size_t>* slots = nullptr);

}  // namespace sidestream
