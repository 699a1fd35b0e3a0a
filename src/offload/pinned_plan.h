#pragma once
#include <cstddef>
#include <vector>

#include "analysis/planner.h"
#include "memory/host_arena.h"
#include "memory/shared_slots.h"
#include "sidestream/progress.h"

namespace sidestream {

/// Plans `profile` for the room of `arena`, pins memory for the offloaded storages, and seals the arena. If the system refuses to pin
/// although the cap has room, it is asked again group by group, in the plan's order. Groups that get no memory stay on the device, and
/// the plan's notes say so. `surplus`: see HostArena::prepare. `progress`, if any, is told if anything is offloaded. `shared`: if not
/// null, storages are offloaded to it. Slots are pinned and leased if it has too little room, one a group. `slots`: if not null, sizes of
/// slots, the largest first, that are pinned too, as far as the cap has room for both. It returns the sizes that exist for this plan. Not
/// together with `shared`.
/// Capture: illegal.  Throws: errors of `progress`; nothing is pinned then.
[[nodiscard]] Plan plan_and_pin(const Profile& profile, HostArena& arena, HostArena::Surplus surplus,
                                const ProgressCallback& progress = {}, SharedSlots::Share* shared = nullptr,
                                std::vector<std::size_t>* slots = nullptr);

}  // namespace sidestream
