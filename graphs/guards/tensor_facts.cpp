#include "graphs/guards/tensor_facts.h"

#include <cstddef>
#include <utility>

#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/variable.h>

namespace sidestream {
namespace {

/// Where the storage of `impl` begins. Not by data(), which throws for a storage that was released.
const void* memory_of(const c10::TensorImpl& impl) noexcept {
  return impl.unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
}

/// The address of its first byte; null if it has no single address.
const void* address_of(const at::Tensor& tensor) noexcept {
  if (!tensor.defined() || tensor.layout() != c10::kStrided || !tensor.has_storage() || tensor.numel() == 0) {
    return nullptr;
  }
  const auto* const memory = static_cast<const std::byte*>(memory_of(*tensor.unsafeGetTensorImpl()));
  return memory == nullptr ? nullptr
                           : memory + static_cast<std::size_t>(tensor.storage_offset()) * tensor.element_size();
}

/// As the tensor says, without calls: all that autograd keeps of a tensor is of this type.
bool requires_grad_of(const c10::TensorImpl& impl) noexcept {
  const auto* const meta = static_cast<const torch::autograd::AutogradMeta*>(impl.autograd_meta());
  return meta != nullptr && (meta->requires_grad_ || meta->grad_fn_ != nullptr);
}

bool same_numbers(c10::IntArrayRef now, c10::ArrayRef<std::int64_t> before) noexcept {
  if (now.size() != before.size()) {
    return false;
  }
  for (std::size_t i = 0; i < now.size(); ++i) {  // so few that a call of memcmp costs more
    if (now[i] != before[i]) {
      return false;
    }
  }
  return true;
}

}  // namespace

TensorFacts::TensorFacts(at::Tensor tensor) : tensor_(std::move(tensor)), address_(address_of(tensor_)) {
  if (tensor_.defined()) {
    dtype_ = tensor_.scalar_type();
    device_ = tensor_.device();
    requires_grad_ = tensor_.requires_grad();
    keys_ = tensor_.key_set();
    type_ = tensor_.dtype();
    sizes_.assign(tensor_.sizes().begin(), tensor_.sizes().end());
    if (address_ != nullptr) {
      memory_ = memory_of(*tensor_.unsafeGetTensorImpl());
      offset_ = tensor_.storage_offset();
      strides_.assign(tensor_.strides().begin(), tensor_.strides().end());
    }
  }
}

FactsChange TensorFacts::change() const noexcept {
  FactsChange change;
  if (!tensor_.defined()) {
    return change;
  }
  const void* const address = address_of(tensor_);
  change.layout = tensor_.scalar_type() != dtype_ || tensor_.device() != device_ ||
                  tensor_.sizes() != c10::IntArrayRef(sizes_) || (address == nullptr) != (address_ == nullptr) ||
                  (address != nullptr && tensor_.strides() != c10::IntArrayRef(strides_));
  change.relocated = address != address_;
  change.requires_grad = tensor_.requires_grad() != requires_grad_;
  return change;
}

bool TensorFacts::as_it_was() const noexcept {
  const c10::TensorImpl& impl = *tensor_.unsafeGetTensorImpl();
  return address_ != nullptr && impl.key_set() == keys_ && impl.dtype() == type_ && impl.has_storage() &&
         memory_of(impl) == memory_ && impl.storage_offset() == offset_ && same_numbers(impl.sizes(), sizes_) &&
         same_numbers(impl.strides(), strides_) && requires_grad_of(impl) == requires_grad_;
}

void TensorFacts::ask_ahead() const noexcept {
  constexpr std::size_t kLine = 64;
  const auto* const impl = reinterpret_cast<const char*>(tensor_.unsafeGetTensorImpl());
  for (std::size_t at = 0; at < sizeof(c10::TensorImpl); at += kLine) {
    __builtin_prefetch(impl + at);
  }
}

void TensorFacts::add_changes(const std::vector<TensorFacts>& tensors, FactsChange& all) noexcept {
  constexpr std::size_t kAhead = 4;
  const std::size_t count = tensors.size();
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      tensors[i + kAhead].ask_ahead();
    }
    if (!tensors[i].as_it_was()) [[unlikely]] {
      all |= tensors[i].change();
    }
  }
}

std::string TensorFacts::difference() const {
  const FactsChange changed = change();
  if (changed.layout) {
    if (tensor_.scalar_type() != dtype_) {
      return c10::str("is ", tensor_.scalar_type(), ", was ", dtype_);
    }
    if (tensor_.device() != device_) {
      return c10::str("is on ", tensor_.device(), ", was on ", device_);
    }
    if (tensor_.sizes() != c10::IntArrayRef(sizes_)) {
      return c10::str("has shape ", tensor_.sizes(), ", had ", c10::IntArrayRef(sizes_));
    }
    return "has other strides";
  }
  if (changed.relocated) {
    return "lies in other memory";
  }
  if (changed.requires_grad) {
    return requires_grad_ ? "is frozen, was trained" : "is trained, was frozen";
  }
  return {};
}

FactsChange& FactsChange::operator|=(const FactsChange& other) noexcept {
  training = training || other.training;
  requires_grad = requires_grad || other.requires_grad;
  relocated = relocated || other.relocated;
  identity = identity || other.identity;
  layout = layout || other.layout;
  options = options || other.options;
  return *this;
}

}  // namespace sidestream
