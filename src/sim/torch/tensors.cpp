#include "sim/torch/tensors.h"
#include "runtime/host_waits.h"

#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/conj_physical.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/Scalar.h>
#include <sidestream/error.h>

#include <cstddef>
#include <string>

#include "runtime/named_streams.h"
#include "runtime/replayed_memory.h"
#include "sim/torch/aliases.h"
#include "sim/torch/copies.h"
#include "sim/torch/cpu_allocator.h"
#include "sim/torch/device_guard.h"
#include "sim/torch/issued_kernel.h"

namespace sidestream::sim {
namespace {

constexpr c10::DispatchKeySet device_key(c10::DispatchKey::PrivateUse1);

void check_layout(std::optional<at::Layout> layout, std::optional<bool> pin_memory) {
  if (layout && *layout != at::kStrided) {
    throw UsageError("the sim device has strided tensors only");
  }
  if (pin_memory.value_or(false)) {
    throw UsageError("only host tensors can be pinned; make the tensor on the CPU");
  }
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<at::Device> /*device*/, std::optional<bool> pin_memory,
                 std::optional<at::MemoryFormat> memory_format) {
  check_layout(layout, pin_memory);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), device_allocator(), device_key,
                                   c10::dtype_or_default(dtype), memory_format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> layout, std::optional<at::Device> /*device*/,
                         std::optional<bool> pin_memory) {
  check_layout(layout, pin_memory);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           device_allocator(), device_key, c10::dtype_or_default(dtype));
}

// LibTorch's own have no memory, and CPU kernels would read them.
at::Tensor efficient_zeros(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                           std::optional<at::Layout> layout, std::optional<at::Device> device,
                           std::optional<bool> pin_memory) {
  at::Tensor zeros = empty(size, dtype, layout, device, pin_memory, std::nullopt);
  zeros.zero_();
  return zeros;
}

void check_fits(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::int64_t offset) {
  const std::size_t bytes =
      at::detail::computeStorageNbytes(size, stride, self.itemsize(), static_cast<std::size_t>(offset));
  if (offset < 0 || bytes > self.storage().nbytes()) {
    throw UsageError("a view needs " + std::to_string(bytes) + " bytes of a storage of " +
                     std::to_string(self.storage().nbytes()) + " bytes");
  }
}

at::Tensor view_of(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::int64_t offset) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(),
                                                   self.dtype());
  impl->set_sizes_and_strides(size, stride, offset);
  return at::Tensor(std::move(impl));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const auto strides = C10_AS_INTARRAYREF_SLOW(stride);
  const std::int64_t start = offset ? offset->expect_int() : self.storage_offset();
  check_fits(self, sizes, strides, start);
  return view_of(self, sizes, strides, start);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  const at::DimVector sizes = at::infer_size_dv(C10_AS_INTARRAYREF_SLOW(size), self.numel());
  const auto strides = at::detail::computeStride(self.sizes(), self.strides(), sizes);
  TORCH_CHECK(
      strides.has_value(),
      "view size is not compatible with input tensor's size and stride (at least one dimension spans across two "
      "contiguous subspaces). Use .reshape(...) instead.");
  return view_of(self, sizes, *strides, self.storage_offset());
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return view_of(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), self.storage_offset());
}

/// A view operator of the CPU, done on an alias; only the metadata of its result is used.
template <typename Make>
at::Tensor view_as_cpu_does(const at::Tensor& self, Make make) {
  const KernelScope scope;
  const at::Tensor result = make(Aliases().of(self));
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()),
                                                   (self.key_set() - kLazyBits) | lazy_bits(result), result.dtype());
  impl->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
  return at::Tensor(std::move(impl));
}

at::Tensor unfold(const at::Tensor& self, std::int64_t dimension, std::int64_t size, std::int64_t step) {
  return view_as_cpu_does(self, [&](const at::Tensor& alias) { return alias.unfold(dimension, size, step); });
}

at::Tensor view_as_real(const at::Tensor& self) {
  return view_as_cpu_does(self, [](const at::Tensor& alias) { return at::view_as_real(alias); });
}

at::Tensor view_as_complex(const at::Tensor& self) {
  return view_as_cpu_does(self, [](const at::Tensor& alias) { return at::view_as_complex(alias); });
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size,
                         std::optional<at::MemoryFormat> memory_format) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const std::size_t bytes = at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(),
                                                                       static_cast<std::size_t>(self.storage_offset()));
  if (bytes > self.storage().nbytes()) {
    resize_storage(self.storage(), bytes);
  }
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (memory_format) {
    impl->empty_tensor_restride(*memory_format);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  if (source.device().type() != kDeviceType) {
    throw UsageError("set_: the storage is on " + source.device().str() + ", the tensor on sim");
  }
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.data() != nullptr || sizes.empty()) {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  } else {
    impl->set_storage_offset(offset.expect_int());
    impl->set_sizes_contiguous(sizes);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<std::int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {c10::SymInt(count)}, {c10::SymInt(1)});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

at::Tensor& set_empty(at::Tensor& self) {
  return set_storage(
      self, c10::Storage(c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true),
      0, {c10::SymInt(0)}, {c10::SymInt(1)});
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& destination) {
  destination.resize_(source.sizes());
  return destination.copy_(source);
}

// LibTorch's own looks for a kernel of the device without the dispatcher.
at::Tensor& conj_physical_in_place(at::Tensor& self) {
  return self.is_complex() ? at::conj_physical_out(self, self) : self;
}

at::Scalar item(const at::Tensor& self) {
  Device& device = Device::get();
  host_waits::tell(kDeviceType, HostWait::value, "aten::_local_scalar_dense");
  device.host_reads(current_stream(), "item()");
  device.ready(current_stream());
  const KernelScope scope;
  return at::native::_local_scalar_dense_cpu(Aliases().of(self));
}

bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  return self.layout() == at::kStrided && from.layout() == at::kStrided;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  Device::get().used_on(self.storage().data(), stream.id());
  ReplayedMemory::used_on(self.storage().data_ptr(), stream);
  named_streams::add(self.storage(), stream);
}

}  // namespace

void resize_storage(const c10::Storage& storage, std::size_t bytes) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  if (!impl->resizable()) {
    throw UsageError("a storage that is not resizable cannot grow on the sim device");
  }
  c10::DataPtr block = device_allocator()->allocate(bytes);
  const std::size_t kept = std::min(bytes, impl->nbytes());
  if (kept > 0) {
    copy_bytes(block.get(), impl->data(), kept);
  }
  impl->set_data_ptr_noswap(std::move(block));
  impl->set_nbytes(bytes);
}

void register_tensors(torch::Library& aten) {
  aten.impl("empty.memory_format", &empty);
  aten.impl("empty_strided", &empty_strided);
  aten.impl("_efficientzerotensor", &efficient_zeros);
  aten.impl("as_strided", &as_strided);
  aten.impl("view", &view);
  aten.impl("_reshape_alias", &reshape_alias);
  aten.impl("unfold", &unfold);
  aten.impl("view_as_real", &view_as_real);
  aten.impl("view_as_complex", &view_as_complex);
  aten.impl("resize_", &resize);
  aten.impl("set_.source_Storage_storage_offset", &set_storage);
  aten.impl("set_.source_Storage", &set_whole_storage);
  aten.impl("set_.source_Tensor", &set_tensor);
  aten.impl("set_", &set_empty);
  aten.impl("_copy_from", &copy_from);
  aten.impl("_copy_from_and_resize", &copy_from_and_resize);
  aten.impl("conj_physical_", &conj_physical_in_place);
  aten.impl("_local_scalar_dense", &item);
  aten.impl("record_stream", &record_stream);
  aten.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
}

void register_lazy_copies(torch::Library& aten) {
  aten.impl("_copy_from", torch::CppFunction::makeFallthrough());
  aten.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}

}  // namespace sidestream::sim
