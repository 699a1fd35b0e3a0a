#include "graphs/outputs/saved_storages.h"

#include <utility>

namespace sidestream {

class SavedStorages::Hooks final : public torch::autograd::SavedVariableHooks {
 public:
  Hooks(WeakStorageSet& saved, std::unique_ptr<torch::autograd::SavedVariableHooks> inner)
      : saved_(&saved), inner_(std::move(inner)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    WeakStorageSet* const saved = std::exchange(saved_, nullptr);  // packed once, while the source lives
    if (saved != nullptr && tensor.defined() && tensor.has_storage()) {
      saved->insert(tensor.storage());
    }
    inner_->call_pack_hook(tensor);
  }
  at::Tensor call_unpack_hook() override { return inner_->call_unpack_hook(); }

 private:
  WeakStorageSet* saved_;
  std::unique_ptr<torch::autograd::SavedVariableHooks> inner_;
};

std::unique_ptr<torch::autograd::SavedVariableHooks> SavedStorages::make_hooks() {
  std::unique_ptr<torch::autograd::SavedVariableHooks> inner = inner_.make_hooks();
  return inner == nullptr ? nullptr : std::make_unique<Hooks>(saved_, std::move(inner));
}

bool SavedStorages::contains(const at::Tensor& tensor) const noexcept {
  return tensor.defined() && tensor.has_storage() && saved_.contains(tensor.storage().unsafeGetStorageImpl());
}

}  // namespace sidestream
