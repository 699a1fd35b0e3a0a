#include "graphs/sandbox/state_keeper.h"

#include <exception>

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include "graphs/sandbox/named_generators.h"

namespace sidestream {

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

}  // namespace sidestream
