#include "graphs/calls/call_modules.h"

#include <algorithm>
#include <vector>

#include <torch/nn/module.h>

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

}  // namespace sidestream
