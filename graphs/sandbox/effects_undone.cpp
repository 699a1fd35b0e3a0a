#include "graphs/sandbox/effects_undone.h"

#include <algorithm>
#include <exception>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

namespace sidestream {
namespace {

bool has_storage(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return impl.has_storage() && !impl.is_wrapped_number() && impl.unsafe_storage().unsafeGetStorageImpl() != nullptr;
}

}  // namespace

EffectsUndone::EffectsUndone(c10::Device device, const std::vector<at::Tensor>& buffers,
                             const std::vector<at::Generator>& generators)
    : observer_([this](const OperatorAccess& access) { after(access); },
                [this](const OperatorAccess& access) { before(access); }) {
  const auto keep = [this](const at::Generator& generator) { drawn_.push_back({generator, generator.get_state()}); };
  keep(at::globalContext().defaultGenerator(device));
  keep(at::detail::getDefaultCPUGenerator());
  std::for_each(generators.begin(), generators.end(), keep);
  for (const at::Tensor& buffer : buffers) {
    if (buffer.defined() && has_storage(buffer)) {
      written_.keep(buffer.storage());
    }
  }
}

EffectsUndone::~EffectsUndone() {
  try {
    const UnobservedGuard unobserved;
    written_.put_back();
    for (Drawn& drawn : drawn_) {
      drawn.generator.set_state(drawn.before);
    }
  } catch (const std::exception&) {  // a device that fails here fails the call that follows, too
  }
}

void EffectsUndone::before(const OperatorAccess& access) {
  if (access.only_shape) {
    return;
  }
  for (const at::Tensor& tensor : access.writes) {
    if (has_storage(tensor) && !made_.contains(tensor.storage().unsafeGetStorageImpl())) {
      written_.keep(tensor.storage());
      temporaries_ = temporaries_ || access.nested;
    }
  }
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
      written_.forget(key);
    }
  }
  if (temporaries_ && !access.nested) {
    written_.forget_dead();
    temporaries_ = false;
  }
}

}  // namespace sidestream
