#include "graphs/sandbox/pass_watch.h"

#include <algorithm>

#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/irange.h>
#include <torch/nn/module.h>

#include "graphs/outputs/storage_holders.h"
#include "memory/storage_view.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

std::string shape_of(const at::Tensor& tensor) {
  return c10::str("a ", tensor.scalar_type(), " tensor ", tensor.sizes());
}

}  // namespace

PassWatch::PassWatch(c10::Device device, Sandbox& sandbox, Exclusions& exclusions, WeakStorageSet& met)
    : device_(device),
      sandbox_(sandbox),
      exclusions_(exclusions),
      met_(met),
      cpu_(at::detail::getDefaultCPUGenerator()) {}

PassWatch::~PassWatch() {
  forget_reads();
  for (const c10::Storage& storage : reads_.made_and_alive()) {
    met_.insert(storage);
  }
}

void PassWatch::enter(const CallSpec& spec, const std::vector<at::Tensor>& inputs,
                      const std::vector<bool>& may_be_offloaded) {
  spec_ = &spec;
  inputs_ = &inputs;
  forget_reads();
  foreign_.clear();
  for (const auto i : c10::irange(inputs.size())) {
    if (!inputs[i].defined()) {
      continue;
    }
    if (inputs[i].device() != device_) {
      throw UsageError(name() + ": input " + std::to_string(i) + ", " + shape_of(inputs[i]) + ", is on " +
                       inputs[i].device().str() + ", but its graphs run on " + device_.str() +
                       " and would never read it again; move it to " + device_.str() + " before the call");
    }
    if (!may_be_offloaded[i]) {
      exclusions_.add_static_input(inputs[i]);
    }
  }
}

void PassWatch::forget_reads() {
  for (const ExternalStorage& external : reads_.take()) {
    met_.insert(external.storage);
  }
}

void PassWatch::before(const OperatorAccess& access) {
  const std::size_t known = reads_.externals().size();
  reads_.observe_before(access);
  const auto& externals = reads_.externals();
  for (std::size_t i = known; i < externals.size(); ++i) {
    exclusions_.add_static_input(externals[i].storage);
    if (externals[i].storage.device() != device_) {
      for (const at::Tensor& read : access.reads) {
        if (storage_impl_of(read) == externals[i].storage.unsafeGetStorageImpl()) {
          note_foreign(read, access);
        }
      }
    }
  }
  if (is_unnamed(access.own_generator) ||
      (access.own_generator != nullptr && access.own_generator->device().is_cpu())) {
    sandbox_.keep_state(GeneratorState(*access.own_generator));
  }
  if (access.only_shape) {
    return;
  }
  for (const at::Tensor& tensor : access.writes) {
    const c10::StorageImpl* const storage = storage_impl_of(tensor);
    for (const auto i : c10::irange(inputs_->size())) {
      if (storage != nullptr && written_input_.empty() && storage_impl_of((*inputs_)[i]) == storage) {
        const std::string registered = registered_name((*inputs_)[i]);
        written_input_ = std::to_string(i) + " (" + registered + access.name +
                         ") in place, but a graph would write its own copy of that input. " +
                         (registered.empty() ? "Clone the input in the call before the in-place operation, or keep the "
                                               "tensor as a registered buffer of the module"
                                             : "Use it in the call without passing it, or pass a clone of it");
      }
    }
    if (storage != nullptr && !reads_.has_made(storage)) {
      sandbox_.keep_bytes(tensor.storage());
    }
  }
}

void PassWatch::after(const OperatorAccess& access) {
  reads_.observe(access);
  if (is_unnamed(access.own_generator)) {
    unnamed_draw_ = access.name;
  }
  if (!access.random || (cpu_draw_ != nullptr && !cpu_draw_nested_)) {
    return;
  }
  const auto on_cpu = [](const at::Tensor& tensor) { return tensor.is_cpu(); };
  const auto given = access.outputs.empty() ? access.writes : access.outputs;
  if (!given.empty() && std::all_of(given.begin(), given.end(), on_cpu) &&
      std::all_of(access.reads.begin(), access.reads.end(), on_cpu)) {
    sandbox_.keep_state(cpu_);
    cpu_draw_ = access.name;  // in the end the operator that the body called
    cpu_draw_nested_ = access.nested;
  }
}

bool PassWatch::is_unnamed(const at::Generator* generator) const {
  const auto& named = spec_->generators;
  return generator != nullptr && !generator->device().is_cpu() &&
         std::find(named.begin(), named.end(), *generator) == named.end();
}

std::string PassWatch::registered_name(const at::Tensor& tensor) const {
  if (spec_->module != nullptr) {
    for (const auto& item : spec_->module->named_parameters()) {
      if (share_memory(item.value(), tensor)) {
        return "parameter \"" + item.key() + "\", ";
      }
    }
    for (const auto& item : spec_->module->named_buffers()) {
      if (share_memory(item.value(), tensor)) {
        return "buffer \"" + item.key() + "\", ";
      }
    }
  }
  return {};
}

void PassWatch::note_foreign(const at::Tensor& tensor, const OperatorAccess& access) {
  if (!tensor.is_meta() && tensor.storage().nbytes() > 0) {
    foreign_.push_back({storage_impl_of(tensor), registered_name(tensor) + shape_of(tensor) + " on " +
                                                     tensor.device().str() + " (read by " + access.name + ")"});
  }
}

void PassWatch::check_inputs() const {
  if (!written_input_.empty()) {
    throw CaptureError(name() + ": it writes its input " + written_input_);
  }
}

void PassWatch::check() const {
  check_inputs();
  for (const Foreign& foreign : foreign_) {
    const ExternalStorage* const external = reads_.find(foreign.storage);
    // If no other reference is left, the call made the tensor without an operator.
    if (external != nullptr && others_hold(external->storage, 1)) {
      throw CaptureError(name() + ": it reads " + foreign.what + " that existed before the call; its graphs run on " +
                         device_.str() + " and would freeze its value. Move it to " + device_.str() +
                         " (Module::to, a registered buffer), or pass a number by value");
    }
  }
  if (unnamed_draw_ != nullptr) {
    throw CaptureError(name() + ": it draws from a generator of its own (" + unnamed_draw_ +
                       "), whose state its graphs would not advance. Name it in GraphOptions::generators or "
                       "Callable::generators, draw from the device's default generator, or draw before the call");
  }
  if (cpu_draw_ != nullptr) {
    throw CaptureError(name() + ": it draws random numbers on the CPU (" + cpu_draw_ +
                       "); each replay would repeat the same numbers. Draw them on " + device_.str() +
                       " (at::TensorOptions), or draw them before the call and pass them as a tensor");
  }
}

}  // namespace sidestream
