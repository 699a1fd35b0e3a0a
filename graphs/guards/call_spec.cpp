#include "graphs/guards/call_spec.h"

#include <algorithm>
#include <string>
#include <utility>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>

#include "memory/storage_view.h"
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

CallInput sample_of(const at::Tensor& input, c10::Device device) {
  const at::NoGradGuard no_grad;
  CallInput sample;
  // A copy to the host would resolve a pending conjugation or negation of a view. Another device is refused by name later.
  sample.on_host = StorageView::supported(input) && input.device() == device && !input.is_conj() && !input.is_neg();
  sample.sample = sample.on_host ? input.detach().to(at::kCPU) : input.detach().clone();
  sample.sample.requires_grad_(input.requires_grad());
  return sample;
}

at::Tensor sample_on(c10::Device device, const CallInput& input) {
  if (!input.on_host) {
    return input.sample;
  }
  const at::NoGradGuard no_grad;
  return input.sample.detach().to(device).requires_grad_(input.sample.requires_grad());
}

std::vector<at::Tensor> arguments_of(const CallSpec& spec, const std::vector<at::Tensor>& leaves) {
  std::vector<at::Tensor> arguments = leaves;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const CallInput& input = spec.inputs[i];
    if (input.aliases && input.aliases->same_as != i) {
      arguments[i] = arguments[input.aliases->same_as];
    } else if (leaves[i].defined() && leaves[i].requires_grad() && !input.shared_cast) {
      arguments[i] = leaves[i].view_as(leaves[i]);
    }
  }
  return arguments;
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

std::vector<at::Generator> generators_of(c10::ArrayRef<CallSpec> specs, c10::Device device) {
  std::vector<at::Generator> all{at::globalContext().defaultGenerator(device)};
  for (const CallSpec& spec : specs) {
    for (const at::Generator& generator : spec.generators) {
      add_once(all, generator);
    }
  }
  return all;
}

}  // namespace sidestream
