#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>

namespace sidestream {

/// How one tensor lies in its storage: enough to lay the same tensor over another storage of the same bytes. Two tensors of
/// one storage stay aliases when both are restored over one new storage. Up to 5 dimensions without a heap allocation.
///
/// Kept: sizes, strides (any, overlapping and zero too), offset, dtype, conjugate and negative bits.
/// Not kept: autograd history and version counter (those of saved tensors are kept elsewhere), and inference mode.
struct StorageView {
  c10::SmallVector<std::int64_t, 5> sizes;
  c10::SmallVector<std::int64_t, 5> strides;
  std::int64_t offset = 0;  ///< in elements of `dtype`
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  c10::DispatchKeySet keys;

  /// True for plain strided tensors on one storage; false for undefined, sparse, quantised, nested and symbolic ones, for
  /// tensor subclasses, and for storages that are shared copy-on-write. Those stay on the device.
  [[nodiscard]] static bool supported(const at::Tensor& tensor) noexcept;

  /// Threads: any. Throws: UsageError when not `supported`.
  [[nodiscard]] static StorageView capture(const at::Tensor& tensor);

  /// A tensor of this geometry over `storage`; a leaf without gradient. Runs no operator.
  /// Throws: UsageError when the view would reach beyond the storage's bytes.
  [[nodiscard]] at::Tensor restore(c10::Storage storage) const;

  /// Bytes of a storage that this view needs at least.
  [[nodiscard]] std::size_t extent_bytes() const;
};

/// The storage of `tensor`; null if it is undefined or has none.
[[nodiscard]] inline const c10::StorageImpl* storage_impl_of(const at::TensorBase& tensor) noexcept {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

/// False if one of them has none.
[[nodiscard]] inline bool same_storage(const at::TensorBase& a, const at::TensorBase& b) noexcept {
  return storage_impl_of(a) != nullptr && storage_impl_of(a) == storage_impl_of(b);
}

/// All bytes of `storage` as a tensor over it, with a version counter of its own: autograd does not see writes through
/// it. Runs no operator.
[[nodiscard]] at::Tensor bytes_of(const c10::Storage& storage);

/// A tensor over the same memory as `tensor` that keeps nothing alive. For memory of a graph, whose pool keeps it.
[[nodiscard]] at::Tensor not_owning(const at::Tensor& tensor);

/// A storage that has no memory. Code that asks for its address gets an error that says `why`.
[[nodiscard]] c10::Storage storage_without_memory(c10::Device device, std::size_t bytes, const std::string& why);

/// An uninitialised device storage of exactly `bytes` bytes by LibTorch's allocator of `device`.
/// Ordering: belongs to the calling thread's current stream. Capture: legal, from the capture's pool.
/// Throws: the allocator's out-of-memory error; UsageError when `device` has no allocator.
[[nodiscard]] c10::Storage allocate_storage(c10::Device device, std::size_t bytes);

}  // namespace sidestream
