#include "graphs/capture/capture_reads.h"

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>

#include <torch/nn/module.h>

#include "sidestream/error.h"

namespace sidestream {
namespace {

bool lies_in(const at::Tensor& tensor, const c10::Storage& storage) {
  return tensor.defined() && tensor.has_storage() &&
         tensor.storage().unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
}

/// A weight's, which the layer watches.
bool is_registered(const CapturedCall& layer, const c10::Storage& storage) {
  const auto any_in = [&](const std::vector<at::Tensor>& tensors) {
    return std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& t) { return lies_in(t, storage); });
  };
  return std::any_of(layer.parameters.begin(), layer.parameters.end(),
                     [&](const CallParameter& parameter) { return lies_in(parameter.tensor, storage); }) ||
         (layer.spec.module != nullptr &&
          (any_in(layer.spec.module->parameters()) || any_in(layer.spec.module->buffers())));
}

/// Among what the layer holds anyway.
bool is_held(const CapturedCall& layer, const c10::Storage& storage) {
  return std::any_of(layer.inputs.begin(), layer.inputs.end(),
                     [&](const StaticInput& input) { return lies_in(input.tensor, storage); }) ||
         std::any_of(layer.parameters.begin(), layer.parameters.end(),
                     [&](const CallParameter& parameter) { return lies_in(parameter.grad, storage); }) ||
         std::any_of(layer.externals.begin(), layer.externals.end(), [&](const c10::Storage& held) {
           return held.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
         });
}

bool is_output(const CapturedCalls& layers, const c10::Storage& storage) {
  return std::any_of(layers.begin(), layers.end(), [&](const CapturedCall& layer) {
    return std::any_of(layer.output_storages.begin(), layer.output_storages.end(),
                       [&](const OutputStorage& held) { return held.is(storage); });
  });
}

}  // namespace

std::size_t references_to(const c10::Storage& storage, const CapturedCalls& layers) {
  const c10::StorageImpl* const sought = storage.unsafeGetStorageImpl();
  std::unordered_set<const c10::TensorImpl*> tensors;
  std::size_t count = 0;
  const auto look_at = [&](const at::Tensor& tensor) {
    if (lies_in(tensor, storage)) {
      tensors.insert(tensor.unsafeGetTensorImpl());
    }
  };
  for (const CapturedCall& layer : layers) {
    for (const StaticInput& input : layer.inputs) {
      look_at(input.tensor);
    }
    for (const StaticOutput& output : layer.outputs) {
      look_at(output.tensor);
      look_at(output.owner);
    }
    for (const OutputStorage& held : layer.output_storages) {
      count += held.is(storage) ? 1 : 0;
    }
    for (const c10::Storage& held : layer.externals) {
      count += held.unsafeGetStorageImpl() == sought ? 1 : 0;
    }
    for (const auto& saved : layer.copies.captured.storages) {
      count += saved->device.unsafeGetStorageImpl() == sought ? 1 : 0;
    }
  }
  return count + tensors.size();
}

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

std::vector<at::Tensor> CaptureReads::give_to(CapturedCall& layer) {
  std::vector<at::Tensor> registered;
  for (ExternalStorage& external : reads_.take()) {
    if (external.written) {
      written_.push_back(external.storage);
    }
    const bool is_weight = is_registered(layer, external.storage);
    if (is_held(layer, external.storage) || (is_weight && layer.spec.hooks == nullptr)) {
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
    if (const at::Tensor tensor = exclusions_.registered(external.storage); tensor.defined() && !is_weight) {
      registered.push_back(tensor);
    }
    layer.externals.push_back(std::move(external.storage));
  }
  return registered;
}

void CaptureReads::let_go_of_registered(CapturedCall& layer) {
  std::erase_if(layer.externals, [&](const c10::Storage& storage) { return is_registered(layer, storage); });
}

void CaptureReads::forward_ended(std::size_t index) {
  std::erase_if(forwards_, [](const auto& made) { return made.second.first.expired(); });
  for (const c10::Storage& storage : reads_.made_and_alive()) {
    forwards_.try_emplace(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl(), index);
  }
}

std::vector<CaptureReads::Made> CaptureReads::kept_by_others(const CapturedCalls& layers) const {
  std::unordered_set<const c10::StorageImpl*> owned;
  const auto own = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.has_storage()) {
      owned.insert(tensor.storage().unsafeGetStorageImpl());
    }
  };
  for (const CapturedCall& layer : layers) {
    for (const StaticInput& input : layer.inputs) {
      own(input.tensor);
    }
    for (const StaticOutput& output : layer.outputs) {
      own(output.seed);
    }
    for (const CallParameter& parameter : layer.parameters) {
      own(parameter.grad);
    }
    for (const auto& saved : layer.copies.captured.storages) {
      owned.insert(saved->device.unsafeGetStorageImpl());
    }
  }
  std::vector<Made> kept;
  for (const auto& [key, made] : forwards_) {
    auto alive = made.first.lock();
    if (!alive) {
      continue;
    }
    c10::Storage storage(std::move(alive));
    // Of an output the graphs have their own references; whoever has one beside them keeps it.
    if (is_output(layers, storage) ? storage.use_count() > 1 + references_to(storage, layers) : !owned.contains(key)) {
      kept.push_back({made.second, std::move(storage)});
    }
  }
  return kept;
}

}  // namespace sidestream
