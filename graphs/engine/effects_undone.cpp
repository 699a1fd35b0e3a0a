#include "graphs/engine/effects_undone.h"

#include <algorithm>
#include <exception>
#include <iterator>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "memory/storage_view.h"

namespace sidestream {
namespace {

bool has_storage(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return impl.has_storage() && !impl.is_wrapped_number() && impl.unsafe_storage().unsafeGetStorageImpl() != nullptr;
}

/// The bytes of `storage` as a tensor with a version counter of its own.
at::Tensor bytes_of(const c10::Storage& storage) {
  StorageView view;
  view.sizes.push_back(static_cast<std::int64_t>(storage.nbytes()));
  view.strides.push_back(1);
  view.dtype = at::kByte;
  view.keys = at::empty({0}, at::TensorOptions(at::kByte).device(storage.device())).key_set();
  return view.restore(storage);
}

}  // namespace

EffectsUndone::EffectsUndone(c10::Device device, const std::vector<at::Tensor>& buffers)
    : generator_(at::globalContext().defaultGenerator(device)),
      host_generator_(at::detail::getDefaultCPUGenerator()),
      random_(generator_.get_state()),
      host_random_(host_generator_.get_state()),
      observer_([this](const OperatorAccess& access) { after(access); },
                [this](const OperatorAccess& access) { before(access); }) {
  for (const at::Tensor& buffer : buffers) {
    if (buffer.defined() && has_storage(buffer)) {
      keep(buffer.storage());
    }
  }
}

EffectsUndone::~EffectsUndone() {
  try {
    const at::NoGradGuard no_grad;
    for (auto& [key, kept] : kept_) {
      if (kept.storage.data() == kept.address &&
          kept.storage.nbytes() == static_cast<std::size_t>(kept.bytes.numel())) {
        bytes_of(kept.storage).copy_(kept.bytes, /*non_blocking=*/true);
      }
    }
    generator_.set_state(random_);
    host_generator_.set_state(host_random_);
  } catch (const std::exception&) {  // a device that fails here fails the call that follows, too
  }
}

void EffectsUndone::keep(const c10::Storage& storage) {
  if (storage.nbytes() == 0 || kept_.count(storage.unsafeGetStorageImpl()) > 0) {
    return;
  }
  const at::NoGradGuard no_grad;
  kept_.emplace(storage.unsafeGetStorageImpl(), Kept{storage, storage.data(), bytes_of(storage).clone()});
}

void EffectsUndone::before(const OperatorAccess& access) {
  if (access.only_shape) {
    return;
  }
  for (const at::Tensor& tensor : access.writes) {
    if (has_storage(tensor) && !made_.contains(tensor.storage().unsafeGetStorageImpl())) {
      keep(tensor.storage());
      temporaries_ = temporaries_ || access.nested;
    }
  }
}

void EffectsUndone::forget_temporaries() {
  for (auto kept = kept_.begin(); kept != kept_.end();) {
    kept = kept->second.storage.use_count() == 1 ? kept_.erase(kept) : std::next(kept);
  }
  temporaries_ = false;
}

// What an operator allocates for its result is written inside of it before it is known to be new.
void EffectsUndone::after(const OperatorAccess& access) {
  for (const at::Tensor& output : access.outputs) {
    if (!has_storage(output)) {
      continue;
    }
    const c10::StorageImpl* const key = output.storage().unsafeGetStorageImpl();
    const auto same = [key](const at::Tensor& tensor) {
      return has_storage(tensor) && tensor.storage().unsafeGetStorageImpl() == key;
    };
    if (std::none_of(access.reads.begin(), access.reads.end(), same)) {
      made_.insert(output.storage());
      kept_.erase(key);
    }
  }
  if (temporaries_ && !access.nested) {
    forget_temporaries();
  }
}

}  // namespace sidestream
