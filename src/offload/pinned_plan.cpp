#include "offload/pinned_plan.h"

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "sidestream/error.h"

namespace sidestream {
namespace {

/// The sizes of what leaves, by the group that saves it first; what leaves as one block has one size.
std::vector<std::vector<std::size_t>> moving_sizes(const Profile& profile, const Plan& plan) {
  std::vector<std::vector<std::size_t>> sizes(profile.groups.size());
  for (std::size_t i = 0; i < profile.storages.size(); ++i) {
    if (plan.decisions[i].fate == Fate::offloaded && !profile.storages[i].small) {
      sizes[profile.storages[i].savers.front()].push_back(profile.storages[i].bytes);
    }
  }
  const auto blocks = block_bytes(profile, plan.decisions.data(), HostArena::alignment);
  for (std::size_t group = 0; group < blocks.size(); ++group) {
    if (blocks[group] > 0) {
      sizes[group].push_back(blocks[group]);
    }
  }
  return sizes;
}

}  // namespace

Plan plan_and_pin(const Profile& profile, HostArena& arena, HostArena::Surplus surplus,
                  const ProgressCallback& progress) {
  Plan plan = make_plan(profile, arena.available(), HostArena::alignment);
  const auto by_group = moving_sizes(profile, plan);
  std::vector<std::size_t> all;
  for (const auto& sizes : by_group) {
    all.insert(all.end(), sizes.begin(), sizes.end());
  }
  if (progress && !all.empty()) {
    progress({ProgressPhase::pin, 0, 1, {}, std::accumulate(all.begin(), all.end(), std::size_t{0})});
  }
  try {
    arena.prepare(all, surplus);
    return plan;
  } catch (const DeviceError&) {  // what it says is said of each group that gets nothing below
  }
  std::vector<std::size_t> pinned;
  for (std::size_t group = 0; group < by_group.size(); ++group) {
    if (by_group[group].empty()) {
      continue;
    }
    const std::size_t before = pinned.size();
    pinned.insert(pinned.end(), by_group[group].begin(), by_group[group].end());
    try {
      arena.prepare(pinned);
    } catch (const DeviceError& error) {
      pinned.resize(before);
      keep_unpinned(plan, profile, static_cast<std::uint32_t>(group), error.what());
    }
  }
  arena.prepare(pinned, surplus);  // pins nothing more
  return plan;
}

}  // namespace sidestream
