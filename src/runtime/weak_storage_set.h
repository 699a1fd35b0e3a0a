#pragma once
#include <cstddef>
#include <vector>

#include <c10/core/Storage.h>
#include <c10/util/flat_hash_map.h>
#include <c10/util/intrusive_ptr.h>

namespace sidestream {

/// Storages by identity without keeping their bytes. The weak reference keeps the address of the dead storage object from being
/// given to a new one, so a member is never mistaken; dead members are swept as the set grows.
/// Threads: one at a time. `contains` allocates nothing, nor does `insert` where as many die as are added.
class WeakStorageSet {
 public:
  void insert(const c10::Storage& storage);
  [[nodiscard]] bool contains(const c10::StorageImpl* storage) const noexcept {
    return members_.find(storage) != members_.end();
  }
  void clear() noexcept { members_.clear(); }
  /// Members that live.
  [[nodiscard]] std::vector<c10::Storage> alive() const;
  /// Forgets storages that have died.
  void sweep();
  /// Members, dead ones that were not swept yet included.
  [[nodiscard]] std::size_t size() const noexcept { return members_.size(); }

 private:
  ska::flat_hash_map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> members_;
  std::size_t sweep_at_ = 0;  ///< there is room for so many
};

}  // namespace sidestream
