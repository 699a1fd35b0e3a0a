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

template <class KeyOf>
std::size_t InputAliases::InTurn::first_at(Table& table, const void* key, std::size_t index,
                                           const KeyOf& key_of) noexcept {
  constexpr std::uint64_t kSpread =
      0x9E3779B97F4A7C15;  // of Fibonacci hashing: its upper bits depend on all of the key's
  constexpr int kUpper = 64 - 9;
  static_assert(kPlaces == std::size_t{1} << (64 - kUpper));
  std::size_t place = static_cast<std::size_t>((reinterpret_cast<std::uintptr_t>(key) * kSpread) >> kUpper);
  for (; table[place] != 0; place = (place + 1) % kPlaces) {
    const std::size_t earlier = table[place] - std::size_t{1};
    if (key_of(inputs_[earlier]) == key) {
      return earlier;
    }
  }
  table[place] = static_cast<std::uint16_t>(index + 1);
  return index;
}

InputAliases InputAliases::InTurn::next() noexcept {
  const std::size_t index = next_++;
  if (few_) {
    return InputAliases::of(inputs_, index);
  }
  InputAliases aliases{index, index};
  const at::Tensor& input = inputs_[index];
  if (!input.defined()) {
    return aliases;
  }
  aliases.same_as = first_at(tensors_, input.unsafeGetTensorImpl(), index,
                             [](const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl(); });
  if (const c10::StorageImpl* const storage = storage_impl_of(input); storage != nullptr) {
    aliases.shares_with = first_at(storages_, storage, index, storage_impl_of);
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
