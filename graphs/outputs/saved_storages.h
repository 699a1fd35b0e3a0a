#pragma once
#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "offload/autograd_engine.h"
#include "runtime/weak_storage_set.h"

namespace sidestream {

/// A source of saved-tensor hooks in front of another one. Notes which storages autograd saves, because a backward reads them.
/// Threads: the forward's.
class SavedStorages final : public SavedTensorSource {
 public:
  explicit SavedStorages(SavedTensorSource& inner) : inner_(inner) {}

  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override;
  [[nodiscard]] bool contains(const at::Tensor& tensor) const noexcept;
  [[nodiscard]] bool contains(const c10::Storage& storage) const noexcept {
    return saved_.contains(storage.unsafeGetStorageImpl());
  }

 private:
  class Hooks;
  SavedTensorSource& inner_;
  WeakStorageSet saved_;
};

}  // namespace sidestream
