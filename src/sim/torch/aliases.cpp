#include "sim/torch/aliases.h"

#include <ATen/EmptyTensor.h>
#include <sidestream/error.h>

#include <cstddef>
#include <cstring>
#include <string>

#include "sim/torch/cpu_allocator.h"
#include "sim/torch/device_guard.h"

namespace sidestream::sim {
namespace {

at::Tensor make_tensor(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key) | lazy_bits(like),
                                                   like.dtype());
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return at::Tensor(std::move(impl));
}

at::Tensor copy_to_device(const at::Tensor& host) {
  at::Tensor copy =
      at::detail::empty_strided_generic(host.sizes(), host.strides(), device_allocator(),
                                        c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), host.scalar_type());
  const Access bytes = extent(host, false);
  std::memcpy(copy.mutable_data_ptr(), bytes.begin, bytes.bytes);
  copy._set_conj(host.is_conj());
  copy._set_neg(host.is_neg());
  return copy;
}

}  // namespace

c10::DispatchKeySet lazy_bits(const at::Tensor& tensor) { return tensor.key_set() & kLazyBits; }

Access extent(const at::Tensor& tensor, bool write) {
  const std::size_t bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
  return bytes == 0 ? Access() : Access{static_cast<const std::byte*>(tensor.const_data_ptr()), bytes, write};
}

at::Tensor Aliases::of(const at::Tensor& tensor) {
  c10::StorageImpl* device = tensor.storage().unsafeGetStorageImpl();
  for (const Pair& pair : pairs_) {
    if (pair.device == device) {
      return make_tensor(pair.cpu, c10::DispatchKey::CPU, tensor);
    }
  }
  void* address = device->mutable_data();
  c10::Storage cpu(c10::Storage::use_byte_size_t(), device->nbytes(), c10::DataPtr(address, c10::Device(c10::kCPU)),
                   operator_allocator(), true);
  pairs_.push_back({device, cpu, address});
  return make_tensor(std::move(cpu), c10::DispatchKey::CPU, tensor);
}

at::Tensor Aliases::adopt(const at::Tensor& result, const char* name, bool kept) {
  if (!result.defined()) {
    return result;
  }
  c10::StorageImpl* cpu = result.storage().unsafeGetStorageImpl();
  for (const Pair& pair : pairs_) {
    if (pair.cpu.unsafeGetStorageImpl() == cpu) {
      return make_tensor(c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(pair.device)),
                         c10::DispatchKey::PrivateUse1, result);
    }
  }
  void* address = cpu->mutable_data();
  if (address == nullptr && result.numel() > 0) {
    throw Error(std::string(name) +
                " returned a tensor without memory, which the sim device does not have; compute it on the CPU");
  }
  if (address != nullptr && !Device::get().owns(address)) {
    if (kept) {
      throw Error(std::string(name) + " returned host memory; on the sim device it cannot be captured or recorded");
    }
    return copy_to_device(result);
  }
  // The kernel's block, from now on a sim storage: the CPU tensor dies with the stack that holds it. A later result on the same
  // block (a second view of it) finds the storage changed and shares it.
  cpu->_mutable_data_ptr_no_checks().unsafe_set_device(sim_device());
  cpu->set_allocator(device_allocator());
  return make_tensor(result.storage(), c10::DispatchKey::PrivateUse1, result);
}

void* Aliases::take_over_resize(const at::Tensor& tensor, const at::Tensor& alias) {
  void* grown = nullptr;
  c10::StorageImpl* cpu = alias.storage().unsafeGetStorageImpl();
  for (Pair& pair : pairs_) {
    if (pair.cpu.unsafeGetStorageImpl() != cpu || pair.address == cpu->data()) {
      continue;
    }
    grown = cpu->mutable_data();
    c10::DataPtr block = cpu->set_data_ptr(c10::DataPtr(grown, c10::Device(c10::kCPU)));
    block.unsafe_set_device(sim_device());
    pair.device->set_data_ptr_noswap(std::move(block));
    pair.device->set_nbytes(cpu->nbytes());
    pair.address = grown;
  }
  if (tensor.sizes() != alias.sizes() || tensor.strides() != alias.strides()) {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
  }
  return grown;
}

}  // namespace sidestream::sim
