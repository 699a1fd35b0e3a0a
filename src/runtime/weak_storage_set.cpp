#include "runtime/weak_storage_set.h"

#include <algorithm>
#include <utility>

namespace sidestream {

void WeakStorageSet::insert(const c10::Storage& storage) {
  if (storage.unsafeGetStorageImpl() == nullptr) {
    return;
  }
  if (members_.size() >= sweep_at_) {
    sweep();
    sweep_at_ = std::max<std::size_t>(64, 2 * members_.size());
    members_.reserve(sweep_at_);
  }
  members_.emplace(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl());
}

std::vector<c10::Storage> WeakStorageSet::alive() const {
  std::vector<c10::Storage> storages;
  for (const auto& [key, member] : members_) {
    if (auto alive = member.lock()) {
      storages.emplace_back(std::move(alive));
    }
  }
  return storages;
}

void WeakStorageSet::sweep() {
  for (auto member = members_.begin(); member != members_.end();) {
    if (member->second.expired()) {
      member = members_.erase(member);
    } else {
      ++member;
    }
  }
}

}  // namespace sidestream
