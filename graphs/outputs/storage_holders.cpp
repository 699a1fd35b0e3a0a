#include "graphs/outputs/storage_holders.h"

#include "offload/saved_storage.h"

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

}  // namespace sidestream
