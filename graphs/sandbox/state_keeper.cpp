#include "graphs/sandbox/state_keeper.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include "sidestream/error.h"

namespace sidestream {
namespace {

void add_once(std::vector<at::Generator>& all, const at::Generator& generator) {
  if (std::find(all.begin(), all.end(), generator) == all.end()) {
    all.push_back(generator);
  }
}

void check_device(const std::string& call, const at::Generator& generator, c10::Device device) {
  if (!generator.defined()) {
    throw UsageError("graphed call \"" + call +
                     "\": one of the generators named for it is undefined; name a generator of " + device.str());
  }
  if (generator.device() != device) {
    throw UsageError("graphed call \"" + call + "\": a generator of " + generator.device().str() +
                     " is named for it, but its graphs on " + device.str() +
                     " cannot draw from it; name a generator of " + device.str());
  }
}

}  // namespace

StateKeeper::StateKeeper(const std::vector<CallSpec>& specs, c10::Device device) {
  const at::NoGradGuard no_grad;
  for (const at::Generator& generator : generators_of(specs, device)) {
    draws_.emplace_back(generator);
  }
  for (const CallSpec& spec : specs) {
    if (spec.module != nullptr) {
      for (const at::Tensor& buffer : spec.module->buffers()) {
        buffers_.emplace_back(buffer, buffer.clone());
      }
    }
  }
  // Last, behind all that the device may refuse: an object that was not made puts nothing back.
  for (const CallSpec& spec : specs) {
    if (spec.module != nullptr) {
      for (const at::Tensor& parameter : spec.module->parameters()) {
        gradients_.emplace_back(parameter, parameter.grad());
        parameter.mutable_grad() = at::Tensor();
      }
    }
  }
}

StateKeeper::~StateKeeper() {
  for (auto item = gradients_.rbegin(); item != gradients_.rend(); ++item) {  // a shared parameter's first entry last
    auto& [parameter, before] = *item;
    if (before.defined() || parameter.grad().defined()) {
      parameter.mutable_grad() = before;
    }
  }
  try {
    const at::NoGradGuard no_grad;
    for (auto& [buffer, before] : buffers_) {
      buffer.detach().copy_(before);
    }
  } catch (const std::exception&) {  // a device that fails here has failed the pass already
  }
}

void name_generators(std::vector<CallSpec>& specs, const GraphOptions& options, c10::Device device) {
  const at::Generator& of_device = at::globalContext().defaultGenerator(device);
  for (CallSpec& spec : specs) {
    std::vector<at::Generator> named;
    for (const auto* const given : {&options.generators(), &std::as_const(spec.generators)}) {
      for (const at::Generator& generator : *given) {
        check_device(spec.name, generator, device);
        if (generator != of_device) {
          add_once(named, generator);
        }
      }
    }
    spec.generators = std::move(named);
  }
}

std::vector<at::Generator> generators_of(const std::vector<CallSpec>& specs, c10::Device device) {
  std::vector<at::Generator> all{at::globalContext().defaultGenerator(device)};
  for (const CallSpec& spec : specs) {
    for (const at::Generator& generator : spec.generators) {
      add_once(all, generator);
    }
  }
  return all;
}

}  // namespace sidestream
