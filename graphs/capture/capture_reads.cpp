#include "graphs/capture/capture_reads.h"

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>

#include <torch/nn/module.h>

#include "memory/storage_view.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

bool has_storage(const at::Tensor& tensor, const c10::Storage& storage) {
  return storage_impl_of(tensor) == storage.unsafeGetStorageImpl();
}

/// A weight's, which the call watches.
bool is_registered(const CapturedCall& call, const c10::Storage& storage) {
  const auto any_in = [&](const std::vector<at::Tensor>& tensors) {
    return std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& t) { return has_storage(t, storage); });
  };
  return std::any_of(call.parameters.begin(), call.parameters.end(),
                     [&](const CallParameter& parameter) { return has_storage(parameter.tensor, storage); }) ||
         (call.spec.module != nullptr &&
          (any_in(call.spec.module->parameters()) || any_in(call.spec.module->buffers())));
}

/// Among what the call holds anyway.
bool is_held(const CapturedCall& call, const c10::Storage& storage) {
  return std::any_of(call.inputs.begin(), call.inputs.end(),
                     [&](const StaticInput& input) { return has_storage(input.tensor, storage); }) ||
         std::any_of(call.parameters.begin(), call.parameters.end(),
                     [&](const CallParameter& parameter) { return has_storage(parameter.grad, storage); }) ||
         std::any_of(call.reads.externals.begin(), call.reads.externals.end(), [&](const c10::Storage& held) {
           return held.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
         });
}

bool is_output(const CapturedCalls& calls, const c10::Storage& storage) {
  return std::any_of(calls.begin(), calls.end(), [&](const CapturedCall& call) {
    return std::any_of(call.output_storages.begin(), call.output_storages.end(),
                       [&](const OutputStorage& held) { return held.is(storage); });
  });
}

}  // namespace

OperatorObserverGuard CaptureReads::watch() {
  return OperatorObserverGuard([this](const OperatorAccess& access) { reads_.observe(access); },
                               [this](const OperatorAccess& access) { before(access); },
                               OperatorObserverGuard::Outer::hears_too);
}

// An operator saves its arguments while it runs: so what it reads from elsewhere is known by then.
void CaptureReads::before(const OperatorAccess& access) {
  const std::size_t known = reads_.externals().size();
  reads_.observe_before(access);
  for (std::size_t i = known; i < reads_.externals().size(); ++i) {
    exclusions_.add_static_input(reads_.externals()[i].storage);
  }
}

std::vector<at::Tensor> CaptureReads::give_to(CapturedCall& call) {
  std::vector<at::Tensor> registered;
  for (ExternalStorage& external : reads_.take()) {
    if (external.written) {
      written_.push_back(external.storage);
    }
    // Parameters may be parts of one buffer, of which the call watches others.
    for (const at::Tensor& tensor : exclusions_.registered_in(external.storage)) {
      const ByteRange all = bytes_in_storage(tensor);
      if (std::any_of(external.parts.begin(), external.parts.end(),
                      [&](const ByteRange& part) { return part.overlaps(all); })) {
        registered.push_back(tensor);
      }
    }
    if (is_held(call, external.storage) || (call.spec.hooks == nullptr && is_registered(call, external.storage))) {
      continue;
    }
    // Memory that a library owns (`from_blob`) may have a new storage each time.
    if (!external.storage.device().is_cpu() && external.storage.allocator() != nullptr &&
        !met_.contains(external.storage.unsafeGetStorageImpl())) {
      throw CaptureError("it reads a tensor of " + std::to_string(external.bytes) +
                         " bytes that the call did not make, and did not read in its earlier run. Either another "
                         "thread makes the tensor during the call, or the call does not do the same work each time. "
                         "Compute the tensor in the call, or compute it before the call and pass it");
    }
    call.reads.externals.push_back(std::move(external.storage));
  }
  return registered;
}

void CaptureReads::release_registered(CapturedCall& call) {
  std::erase_if(call.reads.externals, [&](const c10::Storage& storage) { return is_registered(call, storage); });
}

void CaptureReads::belongs_to(std::size_t forward) {
  std::erase_if(forwards_, [](const auto& made) { return made.second.first.expired(); });
  for (const c10::Storage& storage : reads_.made_and_alive()) {
    forwards_.try_emplace(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl(), forward);
  }
}

std::vector<CaptureReads::Made> CaptureReads::kept_by_others(const CapturedCalls& calls,
                                                             const StorageHolders& holders) const {
  std::unordered_set<const c10::StorageImpl*> owned;
  const auto own = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.has_storage()) {
      owned.insert(tensor.storage().unsafeGetStorageImpl());
    }
  };
  for (const CapturedCall& call : calls) {
    for (const StaticInput& input : call.inputs) {
      own(input.tensor);
    }
    for (const StaticOutput& output : call.outputs) {
      own(output.seed);
    }
    for (const CallParameter& parameter : call.parameters) {
      own(parameter.grad);
    }
    for (const auto& saved : call.copies.captured.storages) {
      owned.insert(saved->device.unsafeGetStorageImpl());
    }
  }
  std::vector<Made> kept;
  for (const auto& [key, made] : forwards_) {
    if (made.second == kNoForward) {
      continue;
    }
    const bool others_hold = holders.others_hold(made.first);  // before it is held here too
    auto alive = made.first.lock();
    if (!alive) {
      continue;
    }
    c10::Storage storage(std::move(alive));
    if (is_output(calls, storage) ? others_hold : !owned.contains(key)) {
      kept.push_back({made.second, std::move(storage)});
    }
  }
  return kept;
}

}  // namespace sidestream
