#pragma once
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "graphs/sequence/captured_call.h"
#include "offload/autograd_engine.h"
#include "offload/exclusions.h"
#include "runtime/weak_storage_set.h"

namespace sidestream {

/// Stands before another source of saved-tensor hooks and notes whose storages autograd saves: a backward reads those.
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

/// What the captured body of `call` gave, sorted by whose memory it is. `leaves` are what it was given, `saved` what autograd
/// saved meanwhile. Throws: CaptureError for views that cannot be made again of what a replay is given.
void learn_outputs(CapturedCall& call, const std::vector<at::Tensor>& leaves, const detail::TensorBuffer& outputs,
                   const SavedStorages& saved, const Exclusions& exclusions);

}  // namespace sidestream
