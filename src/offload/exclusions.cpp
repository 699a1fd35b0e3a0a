#include "offload/exclusions.h"

#include <algorithm>
#include <iterator>
#include <unordered_set>
#include <utility>

#include "memory/storage_view.h"
#include "offload/weight_casts.h"
#include "runtime/composite.h"
#include "runtime/live_memory.h"
#include "runtime/replayed_memory.h"

namespace sidestream {

const char* exclusion_name(Exclusion reason) noexcept {
  switch (reason) {
    case Exclusion::none:
      return "none";
    case Exclusion::parameter:
      return "parameter";
    case Exclusion::small:
      return "small";
    case Exclusion::marked:
      return "marked";
    case Exclusion::other_device:
      return "other device";
    case Exclusion::weight_cast:
      return "weight cast";
    case Exclusion::static_input:
      return "static input";
    case Exclusion::held:
      return "held by the program";
    case Exclusion::unsupported:
      return "unsupported";
  }
  return "";
}

Exclusions::Exclusions(c10::Device device, std::size_t min_bytes) : device_(device), min_bytes_(min_bytes) {}

void Exclusions::set_parameters(std::vector<at::Tensor> parameters_and_buffers) {
  const std::lock_guard lock(mutex_);
  parameters_ = std::move(parameters_and_buffers);
  rebuild_parameter_storages();
}

void Exclusions::rebuild_parameter_storages() {
  parameter_storages_.clear();
  parameter_order_.clear();
  for (const at::Tensor& parameter : parameters_) {
    for_each_part(parameter, [this](const at::Tensor& part) {
      parameter_order_.push_back(storage_impl_of(part));
      if (parameter_order_.back() != nullptr) {
        parameter_storages_.insert(part.storage());
      }
    });
  }
}

bool Exclusions::refresh_parameters() {
  const std::lock_guard lock(mutex_);
  std::size_t next = 0;
  bool relocated = false;
  for (const at::Tensor& parameter : parameters_) {
    for_each_part(parameter, [&](const at::Tensor& part) {
      relocated = relocated || next == parameter_order_.size() || storage_impl_of(part) != parameter_order_[next++];
    });
  }
  if (relocated || next != parameter_order_.size()) {
    rebuild_parameter_storages();
    return true;
  }
  return false;
}

std::vector<at::Tensor> Exclusions::registered_in(const c10::Storage& storage) const {
  const std::lock_guard lock(mutex_);
  std::vector<at::Tensor> found;
  std::copy_if(parameters_.begin(), parameters_.end(), std::back_inserter(found), [&](const at::Tensor& parameter) {
    return storage_impl_of(parameter) == storage.unsafeGetStorageImpl();
  });
  return found;
}

bool Exclusions::is_parameter(const at::Tensor& tensor) const {
  if (!tensor.requires_grad() || !tensor.is_leaf()) {
    return false;
  }
  const std::lock_guard lock(mutex_);
  return parameter_storages_.contains(storage_impl_of(tensor));
}

std::uint64_t Exclusions::registered_bytes() const {
  const std::lock_guard lock(mutex_);
  std::unordered_set<const c10::StorageImpl*> counted;
  std::uint64_t bytes = 0;
  for (const at::Tensor& parameter : parameters_) {
    for_each_part(parameter, [&](const at::Tensor& part) {
      if (const c10::StorageImpl* const storage = storage_impl_of(part);
          storage != nullptr && storage->device() == device_ && counted.insert(storage).second) {
        bytes += storage->nbytes();
      }
    });
  }
  return bytes;
}

std::int64_t Exclusions::gradient_bytes() const {
  const std::lock_guard lock(mutex_);
  std::int64_t bytes = 0;
  for (const at::Tensor& parameter : parameters_) {
    if (parameter.device() == device_ && parameter.requires_grad() && !parameter.grad().defined()) {
      for_each_part(parameter, [&](const at::Tensor& part) { bytes += allocated_bytes(part.nbytes()); });
    }
  }
  return bytes;
}

void Exclusions::mark(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  for_each_part(tensor, [this](const at::Tensor& part) {
    if (storage_impl_of(part) != nullptr) {
      marked_.insert(part.storage());
    }
  });
}

bool Exclusions::is_marked(const at::Tensor& tensor) const {
  const std::lock_guard lock(mutex_);
  return marked_.contains(storage_impl_of(tensor));
}

void Exclusions::add_static_input(const at::Tensor& tensor) {
  if (storage_impl_of(tensor) != nullptr) {
    add_static_input(tensor.storage());
  }
}

void Exclusions::add_static_input(const c10::Storage& storage) {
  const std::lock_guard lock(mutex_);
  static_inputs_.insert(storage);
}

void Exclusions::add_held(const c10::Storage& storage) {
  const std::lock_guard lock(mutex_);
  held_.insert(storage);
}

void Exclusions::remove_static_inputs() noexcept {
  const std::lock_guard lock(mutex_);
  static_inputs_.clear();
}

Exclusion Exclusions::classify(const at::Tensor& tensor) const {
  const std::lock_guard lock(mutex_);
  if (!StorageView::supported(tensor)) {
    return is_composite(tensor) && tensor.requires_grad() && tensor.is_leaf() ? Exclusion::parameter
                                                                              : Exclusion::unsupported;
  }
  const c10::Storage& storage = tensor.storage();
  const c10::StorageImpl* const key = storage.unsafeGetStorageImpl();
  if (storage.device() != device_) {
    return Exclusion::other_device;
  }
  if (parameter_storages_.contains(key) || (tensor.requires_grad() && tensor.is_leaf())) {
    return Exclusion::parameter;
  }
  if (const ReplayedMemory* const replayed = ReplayedMemory::of(storage.data_ptr());
      static_inputs_.contains(key) || (replayed != nullptr && !replayed->given_back())) {
    return Exclusion::static_input;
  }
  if (marked_.contains(key)) {
    return Exclusion::marked;
  }
  if (held_.contains(key)) {
    return Exclusion::held;
  }
  if (is_weight_cast(tensor)) {
    return Exclusion::weight_cast;
  }
  // An empty storage has nothing to offload, whatever the limit.
  return storage.nbytes() < min_bytes_ || storage.nbytes() == 0 ? Exclusion::small : Exclusion::none;
}

}  // namespace sidestream
