#pragma once
#include <cstddef>
#include <unordered_map>
#include <vector>

#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

namespace sidestream {

/// Storages by identity without keeping their bytes. The weak reference keeps the address of the dead storage object from being
/// given to a new one, so a member is never mistaken; dead members are swept as the set grows.
/// Threads: one at a time. `contains` allocates nothing.
class WeakStorageSet {
 public:
  void insert(const c10::Storage& storage);
  [[nodiscard]] bool contains(const c10::StorageImpl* storage) const noexcept { return members_.contains(storage); }
  void clear() noexcept { members_.clear(); }
  /// Members that live.
  [[nodiscard]] std::vector<c10::Storage> alive() const;
  /// Forgets storages that have died.
  void sweep();
  /// Members, dead ones that were not swept yet included.
  [[nodiscard]] std::size_t size() const noexcept { return members_.size(); }

 private:
  std::unordered_map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> members_;
  std::size_t sweep_at_ = 64;
};

}  // namespace sidestream
