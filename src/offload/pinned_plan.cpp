#include "offload/pinned_plan.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#include "sidestream/error.h"

namespace sidestream {
namespace {

/// The sizes of offloaded storages, by the group that saves them first.
std::vector<std::vector<std::size_t>> moving_sizes(const Profile& profile, const Plan& plan) {
  std::vector<std::vector<std::size_t>> sizes(profile.groups.size());
  for (std::size_t i = 0; i < profile.storages.size(); ++i) {
    if (plan.decisions[i].fate == Fate::offloaded) {
      sizes[profile.storages[i].savers.front()].push_back(profile.storages[i].bytes);
    }
  }
  return sizes;
}

/// The sizes of storages that stay because a later group that stays saves them too. In a step that is not as planned they are offloaded,
/// since the later group is not known when they are saved.
std::vector<std::size_t> shared_sizes(const Profile& profile, const Plan& plan) {
  std::vector<std::size_t> sizes;
  for (std::size_t i = 0; i < profile.storages.size(); ++i) {
    const Fate fate = plan.decisions[i].fate;
    const bool first_stays = profile.groups[profile.storages[i].savers.front()].needed_immediately;
    if (fate == Fate::held_back || (fate == Fate::needed_immediately && !first_stays)) {
      sizes.push_back(profile.storages[i].bytes);
    }
  }
  return sizes;
}

std::size_t aligned_sum(const std::vector<std::size_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::size_t{0}, [](std::size_t sum, std::size_t bytes) {
    return sum + (bytes + HostArena::alignment - 1) / HostArena::alignment * HostArena::alignment;
  });
}

/// What `sizes` lack beside `spare` bytes of shared slots, as one slot; what they take of those is no longer spare.
std::vector<std::size_t> lacking(const std::vector<std::size_t>& sizes, std::size_t& spare) {
  const std::size_t needed = aligned_sum(sizes);
  const std::size_t taken = std::min(needed, spare);
  spare -= taken;
  return needed > taken ? std::vector<std::size_t>{needed - taken} : std::vector<std::size_t>{};
}

/// If there are `others`: slots that hold `sizes` and `shared` with an eighth to spare, and that also hold `others` by themselves. Without
/// `others`, or if these slots exceed `room`: `sizes`. `sizes`, `others` and the result: the largest first.
std::vector<std::size_t> slots_of_both(const std::vector<std::size_t>& sizes, const std::vector<std::size_t>& shared,
                                       const std::vector<std::size_t>& others, std::size_t room) {
  constexpr std::size_t kSpare = 8;
  if (others.empty()) {
    return sizes;
  }
  std::vector<std::size_t> both = sizes;
  both.insert(both.end(), shared.begin(), shared.end());
  std::sort(both.begin(), both.end(), std::greater<>());
  std::transform(both.begin(), both.end(), both.begin(), [](std::size_t size) { return size + size / kSpare; });
  both.resize(std::max(both.size(), others.size()));
  std::transform(others.begin(), others.end(), both.begin(), both.begin(),
                 [](std::size_t one, std::size_t other) { return std::max(one, other); });
  return aligned_sum(both) <= room ? both : sizes;
}

}  // namespace

Plan plan_and_pin(const Profile& profile, HostArena& arena, HostArena::Surplus surplus,
                  const ProgressCallback& progress, SharedSlots::Share* shared, std::vector<std::size_t>* slots) {
  std::size_t spare = shared != nullptr ? shared->room() : 0;
  // Shared slots are multiples of the alignment.
  const std::size_t room =
      shared != nullptr ? arena.available() / HostArena::alignment * HostArena::alignment + spare : arena.available();
  Plan plan = make_plan(profile, room, HostArena::alignment);
  const auto by_group = moving_sizes(profile, plan);
  std::vector<std::size_t> all;
  const auto add = [&](const std::vector<std::size_t>& group) {
    const std::vector<std::size_t> sizes = shared != nullptr ? lacking(group, spare) : group;
    all.insert(all.end(), sizes.begin(), sizes.end());
  };
  std::for_each(by_group.begin(), by_group.end(), add);
  std::vector<std::size_t> own;
  if (slots != nullptr) {
    std::sort(all.begin(), all.end(), std::greater<>());
    own = all;
    all = slots_of_both(own, shared_sizes(profile, plan), *slots, arena.available());
    *slots = all;
  }
  if (progress && !all.empty()) {
    progress({ProgressPhase::pin, 0, 1, {}, std::accumulate(all.begin(), all.end(), std::size_t{0})});
  }
  try {
    if (!arena.prepare(all, surplus) && slots != nullptr) {  // too little room is left after earlier plans
      *slots = own;
      arena.prepare(own, surplus);
    }
    if (shared != nullptr) {
      shared->lease(arena, all);
    }
    return plan;
  } catch (const DeviceError&) {  // what it says is said of each group that gets nothing below
  }
  all.clear();
  spare = shared != nullptr ? shared->room() : 0;
  for (std::size_t group = 0; group < by_group.size(); ++group) {
    const std::size_t before = all.size();
    const std::size_t spare_before = spare;
    add(by_group[group]);
    if (all.size() == before) {
      continue;
    }
    try {
      arena.prepare(all);
    } catch (const DeviceError& error) {
      all.resize(before);
      spare = spare_before;
      keep_unpinned(plan, profile, static_cast<std::uint32_t>(group), error.what());
    }
  }
  arena.prepare(all, surplus);  // pins nothing more
  if (slots != nullptr) {
    std::sort(all.begin(), all.end(), std::greater<>());
    *slots = all;
  }
  if (shared != nullptr) {
    shared->lease(arena, all);
  }
  return plan;
}

}  // namespace sidestream
