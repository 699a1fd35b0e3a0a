#include "graphs/outputs/storage_holders.h"

#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/AutogradState.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>

#include "offload/saved_storage.h"
#include "runtime/composite.h"

namespace sidestream {

void KnownReferences::add(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.storage().unsafeGetStorageImpl() != to_) {
    return;
  }
  tensors_.insert(tensor.unsafeGetTensorImpl());
  if (tensor.is_view()) {
    tensors_.insert(tensor._base().unsafeGetTensorImpl());
  }
}

void KnownReferences::add(const SavedStorage& saved) {
  if (saved.device.unsafeGetStorageImpl() == to_) {
    saved_.insert(&saved);
  }
}

std::size_t StorageHolders::known(const c10::StorageImpl* storage) const {
  KnownReferences references(storage);
  for (const Holder& holder : holders_) {
    holder(references);
  }
  return references.count();
}

class SavedStorages::Hooks final : public torch::autograd::SavedVariableHooks {
 public:
  Hooks(WeakStorageSet& saved, std::unique_ptr<torch::autograd::SavedVariableHooks> inner)
      : saved_(&saved), inner_(std::move(inner)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    WeakStorageSet* const saved = std::exchange(saved_, nullptr);  // packed once, while the source lives
    if (saved != nullptr) {
      for_each_part(tensor, [saved](const at::Tensor& part) {
        if (part.defined() && part.has_storage()) {
          saved->insert(part.storage());
        }
      });
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

void await_end_of_backward(c10::Device device) {
  // Inference mode switches both off for as long as it lives, and its end, here, both on.
  if (!c10::AutogradState::get_tls_state().get_multithreading_enabled() && !c10::InferenceMode::is_enabled()) {
    return;
  }
  const c10::InferenceMode no_inference(false);
  const at::AutoGradMode with_gradients(true);
  // Without elements: what autograd's thread holds of this backward itself takes no memory. A view: no kernel, as this may be in a capture.
  const at::Tensor probe = at::empty({0}, at::TensorOptions(at::kFloat).device(device)).requires_grad_(true);
  (void)torch::autograd::grad({probe.view({0})}, {probe}, {probe.detach()});
}

}  // namespace sidestream
