// The part of SavedTensorRecorder that profiles a pass.
#include <memory>
#include <vector>

#include "offload/saved_tensor_recorder.h"

namespace sidestream {

Profile SavedTensorRecorder::profile() const {
  Profile profile;
  profile.storages.assign(storages_.begin(), storages_.end());
  for (const Group& group : groups_) {
    profile.groups.push_back(
        {group.scope->name, group.scope->selected, false, group.to_be_captured, group.scope->budget});
  }
  for (const NamedBudget& named : tree_.budgets()) {
    profile.budgets.push_back(named.budget);
  }
  profile.staying = staying_.profile();
  return profile;
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
