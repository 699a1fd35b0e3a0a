#include "offload/planned_pass.h"

namespace sidestream {

namespace {

/// By group: true if it saved nothing but static outputs, which no later pass meets.
std::vector<bool> with_static_outputs_only(const Profile& profile) {
  std::vector<bool> some(profile.groups.size(), false);
  std::vector<bool> others(profile.groups.size(), false);
  for (const StorageProfile& storage : profile.storages) {
    for (const std::uint32_t saver : storage.savers) {
      (storage.static_output ? some : others)[saver] = true;
    }
  }
  for (std::size_t group = 0; group < some.size(); ++group) {
    some[group] = some[group] && !others[group];
  }
  return some;
}

}  // namespace

PlannedPass lay_out(const Profile& profile, const std::vector<const ScopeNode*>& scopes, const Decision* decisions) {
  PlannedPass pass;
  const std::vector<bool> only_static = with_static_outputs_only(profile);
  std::vector<std::size_t> turns;
  for (std::size_t group = 0; group < scopes.size(); ++group) {
    if (profile.groups[group].captured_later || only_static[group]) {
      turns.push_back(0);
      continue;
    }
    auto& groups = pass[scopes[group]];
    turns.push_back(groups.size());
    groups.emplace_back();
  }
  for (std::size_t i = 0; i < profile.storages.size(); ++i) {
    const std::uint32_t group = profile.storages[i].savers.front();
    if (profile.groups[group].captured_later || profile.storages[i].static_output) {
      continue;
    }
    PlannedGroup& planned = pass[scopes[group]][turns[group]];
    const bool to_offload = decisions[i].fate == Fate::offloaded;
    planned.storages.push_back({profile.storages[i].bytes, to_offload, profile.storages[i].for_weights});
    planned.offloads = planned.offloads || to_offload;
    planned.needed_immediately = planned.needed_immediately || decisions[i].fate == Fate::needed_immediately;
  }
  return pass;
}

const PlannedStorage* PlannedPlaces::take(std::size_t bytes) {
  if (planned_ == nullptr) {
    return nullptr;
  }
  const PlannedStorage* const ahead = take_between(next_, planned_->storages.size(), bytes);
  return ahead != nullptr ? ahead : take_between(0, next_, bytes);
}

const PlannedStorage* PlannedPlaces::take_between(std::size_t first, std::size_t last, std::size_t bytes) {
  for (std::size_t i = first; i < last; ++i) {
    if (!taken_[i] && planned_->storages[i].bytes == bytes) {
      taken_[i] = true;
      next_ = i + 1;
      return &planned_->storages[i];
    }
  }
  return nullptr;
}

}  // namespace sidestream
