#pragma once
#include <unordered_map>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

namespace sidestream {

/// Storages as they were before something wrote them, to be put back. A storage that has died is forgotten with its copy. Version
/// counters stay as they are.
/// Threads: one at a time. Capture: illegal (it copies on the current stream).
class WrittenStorages {
 public:
  /// Copies `storage`, where that was not done yet. Call before it is written.
  void keep(const c10::Storage& storage);
  /// It was made meanwhile: there is nothing to put back.
  void forget(const c10::StorageImpl* storage) { kept_.erase(storage); }
  /// Lets go of the copies of storages that have died.
  void forget_dead();
  /// Every storage that is kept gets its bytes back, in whatever memory it has by then: a held output may have been given another.
  /// Throws: as a copy.
  void put_back();

 private:
  /// The weak reference keeps the address of a dead storage from being met again.
  using Kept = std::pair<c10::weak_intrusive_ptr<c10::StorageImpl>, at::Tensor>;
  std::unordered_map<const c10::StorageImpl*, Kept> kept_;
};

}  // namespace sidestream
