#include "graphs/guards/input_facts.h"

#include <c10/util/irange.h>

#include "memory/storage_view.h"

namespace sidestream {

InputAliases InputAliases::of(c10::ArrayRef<at::Tensor> inputs, std::size_t index) noexcept {
  InputAliases aliases{index, index};
  if (!inputs[index].defined()) {
    return aliases;
  }
  const c10::StorageImpl* const storage = storage_impl_of(inputs[index]);
  for (std::size_t i = index; i-- > 0;) {
    if (inputs[i].is_same(inputs[index])) {
      aliases.same_as = i;
    }
    if (storage != nullptr && storage_impl_of(inputs[i]) == storage) {
      aliases.shares_with = i;
    }
  }
  return aliases;
}

bool has_shared_cast(const at::Tensor& tensor) {
  return tensor.requires_grad() && tensor.is_leaf() && !tensor.is_view();
}

bool same_strides(const at::Tensor& a, const at::Tensor& b) {
  const c10::IntArrayRef sizes = a.sizes();
  const c10::IntArrayRef a_strides = a.strides();
  const c10::IntArrayRef b_strides = b.strides();
  for (const auto dim : c10::irange(sizes.size())) {
    if (sizes[dim] != 1 && a_strides[dim] != b_strides[dim]) {
      return a.numel() == 0;
    }
  }
  return true;
}

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg() && same_strides(a, b);
}

}  // namespace sidestream
