// The part of SavedTensorRecorder that profiles a pass.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "offload/saved_tensor_recorder.h"

namespace sidestream {

Profile SavedTensorRecorder::profile() const {
  Profile profile;
  const std::vector<bool> kept = in_profile();
  std::vector<bool> with_small(groups_.size(), false);
  for (std::size_t i = 0; i < storages_.size(); ++i) {
    if (kept[i]) {
      profile.storages.push_back(storages_[i]);
      with_small[storages_[i].savers.front()] = true;
    }
  }
  for (const Group& group : groups_) {
    const bool nothing_else = group.only_small && !with_small[group.index];
    profile.groups.push_back({group.scope->name, group.scope->selected, false, group.to_be_captured, nothing_else,
                              group.block_bytes, group.small_bytes > 0});
  }
  profile.block_from = exclusions_.min_bytes();
  return profile;
}

std::vector<SavedIdentity> SavedTensorRecorder::identities() const {
  const std::vector<bool> kept = in_profile();
  std::vector<SavedIdentity> identities;
  for (std::size_t i = 0; i < identities_.size(); ++i) {
    if (kept[i]) {
      identities.push_back(identities_[i]);
    }
  }
  return identities;
}

std::vector<bool> SavedTensorRecorder::in_profile() const {
  std::vector<std::uint64_t> own(groups_.size(), 0);
  for (const StorageProfile& storage : storages_) {
    own[storage.savers.front()] += storage.small && storage.savers.size() == 1 ? storage.bytes : 0;
  }
  std::vector<bool> kept;
  kept.reserve(storages_.size());
  for (const StorageProfile& storage : storages_) {
    const Group& group = groups_[storage.savers.front()];
    const bool enough = own[group.index] >= group.block_from || group.block_bytes > 0;  // now, or in the pass before
    kept.push_back(!storage.small || (group.scope->selected && enough));
  }
  return kept;
}

void SavedTensorRecorder::count_small(const Group& group) {
  if (group.small_bytes == 0 || !group.scope->selected || group.small_bytes < group.block_from) {
    return;
  }
  saved_bytes_ += group.small_bytes;
  ExclusionTally offloaded;
  for (const auto& weak : group.small) {
    if (const auto saved = weak.lock(); saved != nullptr && saved->block != nullptr) {
      offloaded.tensors += saved->tensors;
      offloaded.bytes += saved->tensors * saved->bytes;
    }
  }
  exclusions_.offloaded_after_all(offloaded);
}

std::shared_ptr<const SavedStorage> SavedTensorRecorder::saved(const c10::StorageImpl* storage) const {
  const auto found = entries_.find(storage);
  return found == entries_.end() ? nullptr : found->second.saved.lock();
}

SavedTensorRecorder::Counts SavedTensorRecorder::counts() const noexcept {
  Counts counts = counts_;
  for (const Group& group : groups_) {
    counts.refused_bytes += group.refused_bytes;
  }
  return counts;
}

std::vector<const ScopeNode*> SavedTensorRecorder::group_scopes() const {
  std::vector<const ScopeNode*> scopes;
  for (const Group& group : groups_) {
    scopes.push_back(group.scope);
  }
  return scopes;
}

}  // namespace sidestream
