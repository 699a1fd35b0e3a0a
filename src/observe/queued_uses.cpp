#include "observe/queued_uses.h"

#include <algorithm>

namespace sidestream {

void QueuedUses::add(const at::Tensor& tensor, StreamKey stream) {
  if (!tensor.has_storage() || tensor.storage().nbytes() == 0) {
    return;
  }
  c10::StorageImpl* const key = tensor.storage().unsafeGetStorageImpl();
  const bool known = std::any_of(uses_.begin(), uses_.end(), [&](const Use& use) {
    return use.storage._unsafe_get_target() == key && use.memory.stream == stream;
  });
  if (!known) {
    // Not by data(), which throws for a storage that was released.
    const void* const data = key->_mutable_data_ptr_no_checks().get();
    uses_.push_back({tensor.storage().getWeakStorageImpl(), {stream, data, tensor.storage().nbytes()}});
  }
}

std::vector<QueuedUses::Freed> QueuedUses::take_freed() {
  std::vector<Freed> freed;
  std::erase_if(uses_, [&](const Use& use) {
    if (use.storage.expired()) {
      freed.push_back(use.memory);
      return true;
    }
    return false;
  });
  return freed;
}

}  // namespace sidestream
