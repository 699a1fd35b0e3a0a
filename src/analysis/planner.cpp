#include "analysis/planner.h"

#include <algorithm>
#include <cmath>

#include "base/mebibytes.h"

namespace sidestream {
namespace {

Decision wanted(const Profile& profile, const StorageProfile& storage) {
  const std::uint32_t first = storage.savers.front();
  if (!profile.groups[first].selected) {
    return {Fate::not_selected, first};
  }
  if (storage.static_output) {
    return {Fate::static_output, first};
  }
  if (storage.held_elsewhere) {
    return {Fate::held_elsewhere, first};
  }
  if (storage.marked) {
    return {Fate::marked, first};
  }
  for (const std::uint32_t saver : storage.savers) {
    if (profile.groups[saver].needed_immediately) {
      return {Fate::needed_immediately, saver};
    }
  }
  for (const std::uint32_t saver : storage.savers) {
    if (!profile.groups[saver].selected) {
      return {Fate::held_back, saver};
    }
  }
  return {Fate::offloaded, first};
}

/// What a group is called in notes.
std::string name_of(const GroupProfile& group) { return group.name.empty() ? "(no scope)" : group.name; }

std::uint64_t rounded(std::uint64_t bytes, std::uint64_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

/// Keeps those groups that do not fit into their budgets: `bytes` of each would be offloaded. True for each that stays.
std::vector<bool> over_budget(const Profile& profile, const std::vector<std::uint64_t>& bytes) {
  std::vector<std::uint64_t> left(profile.budgets.size(), 0);
  for (std::size_t group = 0; group < bytes.size(); ++group) {
    if (const std::uint32_t budget = profile.groups[group].budget; budget != 0) {
      left[budget - 1] += bytes[group];
    }
  }
  for (std::size_t i = 0; i < left.size(); ++i) {
    const OffloadBudget& budget = profile.budgets[i];
    const auto part = static_cast<std::uint64_t>(std::llround(static_cast<double>(left[i]) * budget.fraction));
    left[i] = std::min(budget.bytes, budget.fraction < 1 ? part : left[i]);
  }
  std::vector<bool> stays(bytes.size(), false);
  for (std::size_t group = 0; group < bytes.size(); ++group) {
    if (const std::uint32_t budget = profile.groups[group].budget; budget != 0) {
      stays[group] = bytes[group] > left[budget - 1];
      left[budget - 1] -= stays[group] ? 0 : bytes[group];
    }
  }
  return stays;
}

}  // namespace

Plan make_plan(const Profile& profile, std::uint64_t room_bytes, std::uint64_t alignment) {
  Plan plan;
  plan.decisions.reserve(profile.storages.size());
  for (const StorageProfile& storage : profile.storages) {
    plan.decisions.push_back(wanted(profile, storage));
  }
  std::vector<std::uint64_t> bytes(profile.groups.size(), 0);
  for (std::size_t i = 0; i < profile.storages.size(); ++i) {
    const StorageProfile& storage = profile.storages[i];
    bytes[storage.savers.front()] += plan.decisions[i].fate == Fate::offloaded ? storage.bytes * storage.runs : 0;
  }
  const std::vector<bool> stays = over_budget(profile, bytes);
  std::vector<std::uint64_t> pinned(profile.groups.size(), 0);
  for (std::size_t i = 0; i < profile.storages.size(); ++i) {
    const StorageProfile& storage = profile.storages[i];
    Decision& decision = plan.decisions[i];
    if (decision.fate == Fate::offloaded && stays[storage.savers.front()]) {
      decision.fate = Fate::over_budget;
    } else if (decision.fate == Fate::offloaded) {
      pinned[storage.savers.front()] += rounded(storage.bytes, alignment);
    } else if (decision.fate == Fate::held_back) {
      const GroupProfile& holder = profile.groups[decision.held_by];
      plan.notes.push_back(
          "a storage of " + mebibytes(storage.bytes) + " saved by " + name_of(profile.groups[storage.savers.front()]) +
          " stays: " + name_of(holder) + " saves it too and is not offloaded; " +
          (holder.name.empty() ? "put that code into a scope that Options::offload names" : "offload that group too"));
    }
  }
  std::vector<bool> over_cap(profile.groups.size(), false);
  for (std::size_t group = 0; group < profile.groups.size(); ++group) {
    if (pinned[group] == 0) {
      continue;
    }
    if (pinned[group] > room_bytes) {
      over_cap[group] = true;
      plan.notes.push_back("group " + name_of(profile.groups[group]) + " stays: its " + mebibytes(pinned[group]) +
                           " do not fit into the host cap; raise Options::host_cap, or offload fewer groups");
    } else {
      room_bytes -= pinned[group];
    }
  }
  for (std::size_t i = 0; i < plan.decisions.size(); ++i) {
    Decision& decision = plan.decisions[i];
    if (decision.fate != Fate::offloaded) {
      continue;
    }
    if (over_cap[profile.storages[i].savers.front()]) {
      decision.fate = Fate::over_cap;
    } else {
      plan.offloaded_bytes += profile.storages[i].bytes;
    }
  }
  return plan;
}

void keep_unpinned(Plan& plan, const Profile& profile, std::uint32_t group, const std::string& why) {
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < plan.decisions.size(); ++i) {
    if (plan.decisions[i].fate == Fate::offloaded && profile.storages[i].savers.front() == group) {
      plan.decisions[i].fate = Fate::not_pinned;
      bytes += profile.storages[i].bytes;
    }
  }
  plan.offloaded_bytes -= bytes;
  plan.notes.push_back("group " + name_of(profile.groups[group]) + " stays: its " + mebibytes(bytes) +
                       " of pinned host memory were refused (" + why + ")");
}

}  // namespace sidestream
