#pragma once
#include <unordered_map>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

namespace sidestream {

/// Copies of storages, made before something writes the storages. A dead storage is forgotten with its copy. Version counters do not
/// change.
/// Threads: one at a time. Capture: illegal (it copies on the current stream).
class WrittenStorages {
 public:
  /// Copies `storage`, unless it was copied before. Call it before anything writes the storage.
  void keep(const c10::Storage& storage);
  /// The run itself made the storage: there is nothing to put back.
  void forget(const c10::StorageImpl* storage) { kept_.erase(storage); }
  /// Frees the copies of dead storages.
  void forget_dead();
  /// Gives each storage its bytes back, in the memory that the storage has now: a held output may have been given other memory.
  /// Throws: as a copy.
  void put_back();

 private:
  /// The weak reference prevents that a new storage gets the address of a dead one.
  using Kept = std::pair<c10::weak_intrusive_ptr<c10::StorageImpl>, at::Tensor>;
  std::unordered_map<const c10::StorageImpl*, Kept> kept_;
};

}  // namespace sidestream
