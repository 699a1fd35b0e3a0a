#include "graphs/sandbox/written_storages.h"

#include <ATen/core/grad_mode.h>

#include "memory/storage_view.h"

namespace sidestream {

void WrittenStorages::keep(const c10::Storage& storage) {
  const c10::StorageImpl* const key = storage.unsafeGetStorageImpl();
  if (key == nullptr || storage.nbytes() == 0 || kept_.contains(key)) {
    return;
  }
  forget_dead();
  const at::NoGradGuard no_grad;
  kept_.emplace(key, Kept(storage.getWeakStorageImpl(), bytes_of(storage).clone()));
}

void WrittenStorages::put_back() {
  const at::NoGradGuard no_grad;
  for (auto& [key, kept] : kept_) {
    if (auto alive = kept.first.lock()) {
      const c10::Storage storage(std::move(alive));
      const auto bytes = static_cast<std::int64_t>(storage.nbytes());
      if (bytes >= kept.second.numel()) {  // a smaller storage was resized: its old bytes are lost
        bytes_of(storage).narrow(0, 0, kept.second.numel()).copy_(kept.second, /*non_blocking=*/true);
      }
    }
  }
  kept_.clear();
}

void WrittenStorages::forget_dead() {
  std::erase_if(kept_, [](const auto& kept) { return kept.second.first.expired(); });
}

}  // namespace sidestream
