#include "runtime/composite.h"

#include <cstdint>
#include <initializer_list>

#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/quantized/QTensorImpl.h>
#include <ATen/quantized/Quantizer.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/TensorOptions.h>

namespace sidestream {
namespace {

using Parts = c10::ArrayRef<at::Tensor>;

/// All bytes of the tensor's own storage. Autograd sees writes through the tensor as writes to this part.
at::Tensor storage_bytes(const c10::TensorImpl& impl) {
  const c10::InferenceMode no_inference(false);  // an inference tensor cannot share a version counter
  constexpr auto byte = c10::ScalarType::Byte;
  const c10::Storage& storage = impl.unsafe_storage();
  at::Tensor bytes = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::computeDispatchKey(byte, c10::kStrided, storage.device())),
      caffe2::TypeMeta::fromScalarType(byte));
  bytes.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<std::int64_t>(storage.nbytes())});
  bytes.unsafeGetTensorImpl()->set_version_counter(impl.version_counter());
  return bytes;
}

Composite split_coo(const at::SparseTensorImpl& impl) {
  return {{impl.indices(), impl.values()},
          [keys = impl.key_set(), type = impl.dtype(), sizes = impl.sizes().vec(), sparse = impl.sparse_dim(),
           dense = impl.dense_dim(), coalesced = impl.coalesced()](Parts parts) {
            const c10::DeviceGuard on_device(parts[1].device());  // its empty parts are made there
            at::Tensor tensor = at::detail::make_tensor<at::SparseTensorImpl>(keys, type);
            auto& made = *static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
            made.raw_resize_(sparse, dense, sizes);
            made.set_indices_and_values_unsafe(parts[0], parts[1]);
            made.set_coalesced(coalesced);
            return tensor;
          }};
}

Composite split_compressed(const at::SparseCsrTensorImpl& impl) {
  return {{impl.compressed_indices(), impl.plain_indices(), impl.values()},
          [keys = impl.key_set(), type = impl.dtype(), device = impl.device(), layout = impl.layout(),
           sizes = impl.sizes().vec()](Parts parts) {
            at::Tensor tensor = at::detail::make_tensor<at::SparseCsrTensorImpl>(keys, device, layout, type);
            static_cast<at::SparseCsrTensorImpl*>(tensor.unsafeGetTensorImpl())
                ->set_member_tensors(parts[0], parts[1], parts[2], c10::IntArrayRef(sizes));
            return tensor;
          }};
}

// Sizes, strides and offsets are small tensors on the host, of any nested tensor.
Composite split_nested(const at::native::NestedTensorImpl& impl) {
  return {{storage_bytes(impl)},
          [keys = impl.key_set(), type = impl.dtype(), sizes = impl.get_nested_sizes(),
           strides = impl.get_nested_strides(), offsets = impl.get_storage_offsets()](Parts parts) {
            return at::detail::make_tensor<at::native::NestedTensorImpl>(c10::Storage(parts[0].storage()), keys, type,
                                                                         sizes, strides, offsets);
          }};
}

/// `quantizer` makes a quantiser from the parts.
template <class Quantizer>
Composite split_quantised(const at::QTensorImpl& impl, std::initializer_list<at::Tensor> parts, Quantizer quantizer) {
  return {parts, [keys = impl.key_set(), type = impl.dtype(), sizes = impl.sizes().vec(),
                  strides = impl.strides().vec(), offset = impl.storage_offset(), quantizer](Parts of) {
            at::Tensor tensor =
                at::detail::make_tensor<at::QTensorImpl>(c10::Storage(of[0].storage()), keys, type, quantizer(of));
            tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
            return tensor;
          }};
}

template <class Quantizer>
Composite split_per_channel(const at::QTensorImpl& impl, const Quantizer& quantizer) {
  return split_quantised(impl, {storage_bytes(impl), quantizer.scales(), quantizer.zero_points()},
                         [type = quantizer.scalar_type(), axis = quantizer.axis()](Parts parts) {
                           return at::QuantizerPtr(c10::make_intrusive<Quantizer>(type, parts[1], parts[2], axis));
                         });
}

// By type: an unknown quantiser, which a tensor has until a kernel fills it, does not tell its scheme.
std::optional<Composite> split_quantised(at::QTensorImpl& impl) {
  const at::QuantizerPtr quantizer = impl.quantizer();
  if (dynamic_cast<const at::PerTensorAffineQuantizer*>(quantizer.get()) != nullptr) {
    return split_quantised(impl, {storage_bytes(impl)}, [quantizer](Parts /*parts*/) { return quantizer; });
  }
  if (const auto* floats = dynamic_cast<const at::PerChannelAffineFloatQParamsQuantizer*>(quantizer.get())) {
    return split_per_channel(impl, *floats);
  }
  if (const auto* channels = dynamic_cast<const at::PerChannelAffineQuantizer*>(quantizer.get())) {
    return split_per_channel(impl, *channels);
  }
  return std::nullopt;
}

}  // namespace

std::optional<Composite> split(const at::Tensor& tensor) {
  if (!is_composite(tensor)) {
    return std::nullopt;
  }
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (impl.has_symbolic_sizes_strides() || impl.key_set().has_any(wrapped_keys)) {
    return std::nullopt;
  }
  if (impl.key_set().has(c10::DispatchKey::Sparse)) {
    return split_coo(static_cast<const at::SparseTensorImpl&>(impl));
  }
  if (impl.key_set().has(c10::DispatchKey::SparseCsr)) {
    return split_compressed(static_cast<const at::SparseCsrTensorImpl&>(impl));
  }
  if (impl.key_set().has(c10::DispatchKey::NestedTensor)) {
    return split_nested(static_cast<const at::native::NestedTensorImpl&>(impl));
  }
  return split_quantised(static_cast<at::QTensorImpl&>(impl));
}

}  // namespace sidestream
