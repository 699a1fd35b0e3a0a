#include "graphs/guards/call_spec.h"

#include <algorithm>
#include <string>
#include <utility>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Layout.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>

#include "memory/storage_view.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// Stands for several modules wherever one is asked for its parameters, buffers, modules and mode.
class SeveralModules final : public torch::nn::Module {
 public:
  explicit SeveralModules(const std::vector<std::shared_ptr<torch::nn::Module>>& modules)
      : torch::nn::Module("SeveralModules") {
    for (const auto& module : modules) {
      register_module(std::to_string(children().size()), module);
    }
  }
  [[nodiscard]] bool is_training() const noexcept override {
    const auto all = children();
    return std::all_of(all.begin(), all.end(), [](const auto& module) { return module->is_training(); });
  }
};

/// The index of the first sparse or nested one; their number if there is none.
std::size_t first_composite(c10::ArrayRef<at::Tensor> tensors) {
  return static_cast<std::size_t>(std::find_if(tensors.begin(), tensors.end(), is_sparse_or_nested) - tensors.begin());
}

std::string composite_in_words(const at::Tensor& tensor) {
  return c10::str(" is ", tensor.is_nested() ? "a nested tensor" : "a sparse tensor of layout ",
                  tensor.is_nested() ? "" : c10::str(tensor.layout()),
                  ", and graphs take and give plain tensors only; pass its values and indices (or sizes) as tensors "
                  "of their own, or run it eagerly");
}

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

std::shared_ptr<const torch::nn::Module> modules_of_call(const std::string& name,
                                                         const std::shared_ptr<const torch::nn::Module>& own,
                                                         const detail::KeptModules& arguments,
                                                         const torch::nn::Module& model) {
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  const auto add = [&](const std::shared_ptr<const torch::nn::Module>& module) {
    if (std::none_of(modules.begin(), modules.end(), [&](const auto& other) { return other == module; })) {
      modules.push_back(std::const_pointer_cast<torch::nn::Module>(module));
    }
  };
  if (own != nullptr) {
    add(own);
  }
  for (const auto& module : arguments) {
    if (module.use_count() == 0 && module.get() != &model) {
      throw UsageError("graphed call \"" + name + "\": the module \"" + module->name() +
                       "\" is an argument, but no shared_ptr owns it, so its lifetime is unknown; make it with " +
                       "std::make_shared, or register it in the model");
    }
    add(module);
  }
  if (modules.size() <= 1) {
    return modules.empty() ? nullptr : modules.front();
  }
  return std::make_shared<SeveralModules>(modules);
}

void refuse_composite_inputs(const std::string& call, c10::ArrayRef<at::Tensor> inputs) {
  if (const std::size_t i = first_composite(inputs); i < inputs.size()) {
    throw UsageError(call + ": input " + std::to_string(i) + composite_in_words(inputs[i]));
  }
}

void refuse_composite_outputs(const std::string& call, c10::ArrayRef<at::Tensor> outputs) {
  if (const std::size_t i = first_composite(outputs); i < outputs.size()) {
    throw CaptureError(call + ": output " + std::to_string(i) + composite_in_words(outputs[i]));
  }
}

void refuse_nested_members(const std::string& call, const torch::nn::Module& module) {
  const auto refuse = [&](const auto& members) {
    for (const auto& member : members) {
      if (member.value().defined() && member.value().is_nested()) {
        throw UsageError(call + ": \"" + member.key() +
                         "\" is a nested tensor, in which a replay notices no change; register its values and sizes "
                         "as plain tensors, or run the module eagerly");
      }
    }
  };
  refuse(module.named_parameters());
  refuse(module.named_buffers());
}

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
