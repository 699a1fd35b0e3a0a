#include "graphs/capture/not_owning.h"

#include "memory/storage_view.h"

namespace sidestream {

at::Tensor not_owning(const at::Tensor& tensor) {
  const c10::Storage& owner = tensor.storage();
  return StorageView::capture(tensor).restore(c10::Storage(c10::Storage::use_byte_size_t(), owner.nbytes(),
                                                           c10::DataPtr(owner.mutable_data(), owner.device()), nullptr,
                                                           /*resizable=*/false));
}

}  // namespace sidestream
