#include "memory/storage_view.h"

#include <string>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/COW.h>

#include "runtime/composite.h"
#include "sidestream/error.h"

namespace sidestream {

bool StorageView::supported(const at::Tensor& tensor) noexcept {
  if (!tensor.defined()) {
    return false;
  }
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (impl.layout() != c10::Layout::Strided || !impl.has_storage() || impl.has_symbolic_sizes_strides() ||
      tensor.is_quantized() || tensor.is_nested() || impl.key_set().has_any(wrapped_keys)) {
    return false;
  }
  // Not by data_ptr(), which throws for a storage that was released.
  c10::StorageImpl* storage = impl.unsafe_storage().unsafeGetStorageImpl();
  return storage != nullptr && !storage->sym_nbytes().is_heap_allocated() &&
         !c10::impl::cow::is_cow_data_ptr(storage->_mutable_data_ptr_no_checks());
}

StorageView StorageView::capture(const at::Tensor& tensor) {
  if (!supported(tensor)) {
    throw UsageError(
        "a saved tensor is not a plain strided tensor (undefined, sparse, quantised, nested, copy-on-write or a "
        "subclass); " +
        std::string("it cannot be offloaded: mark it with mark_not_offload"));
  }
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  StorageView view;
  view.sizes.assign(impl.sizes().begin(), impl.sizes().end());
  view.strides.assign(impl.strides().begin(), impl.strides().end());
  view.offset = impl.storage_offset();
  view.dtype = tensor.scalar_type();
  view.keys = impl.key_set();
  return view;
}

std::size_t StorageView::extent_bytes() const {
  return at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(dtype), static_cast<std::size_t>(offset));
}

at::Tensor StorageView::restore(c10::Storage storage) const {
  if (const std::size_t needed = extent_bytes(); needed > storage.nbytes()) {
    throw UsageError("a tensor of " + std::to_string(needed) + " bytes does not fit into a storage of " +
                     std::to_string(storage.nbytes()));
  }
  at::Tensor tensor =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, caffe2::TypeMeta::fromScalarType(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

at::Tensor bytes_of(const c10::Storage& storage) {
  constexpr auto byte = c10::ScalarType::Byte;
  StorageView view;
  view.sizes.push_back(static_cast<std::int64_t>(storage.nbytes()));
  view.strides.push_back(1);
  view.dtype = byte;
  view.keys = c10::DispatchKeySet(c10::computeDispatchKey(byte, c10::kStrided, storage.device()));
  return view.restore(storage);
}

c10::Storage allocate_storage(c10::Device device, std::size_t bytes) {
  c10::Allocator* const allocator = c10::GetAllocator(device.type());
  if (allocator == nullptr) {
    throw UsageError("no allocator is registered for device " + device.str());
  }
  const c10::OptionalDeviceGuard guard(device);
  return c10::Storage(c10::make_storage_impl(c10::StorageImpl::use_byte_size_t{},
                                             c10::SymInt(static_cast<std::int64_t>(bytes)), allocator->allocate(bytes),
                                             allocator, /*resizable=*/false, device));
}

c10::Storage storage_without_memory(c10::Device device, std::size_t bytes, const std::string& why) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, device), nullptr,
                       /*resizable=*/false);
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(why);
  return storage;
}

at::Tensor not_owning(const at::Tensor& tensor) {
  const c10::Storage& owner = tensor.storage();
  return StorageView::capture(tensor).restore(c10::Storage(c10::Storage::use_byte_size_t(), owner.nbytes(),
                                                           c10::DataPtr(owner.mutable_data(), owner.device()), nullptr,
                                                           /*resizable=*/false));
}

}  // namespace sidestream
