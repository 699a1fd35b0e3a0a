#include "graphs/gradients/gradient_policies.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include <torch/nn/module.h>

#include "offload/name_pattern.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// As in NamePatterns, "all" is "**".
GradientRule checked_rule(const GradientRule& rule) {
  return {NamePatterns(std::vector<std::string>{rule.pattern}).patterns().front(), rule.policy};
}

}  // namespace

GradientPolicies::GradientPolicies(const GraphOptions& options, const torch::nn::Module* model,
                                   const std::vector<CallSpec>& specs) {
  if (options.gradients().empty()) {
    return;
  }
  std::transform(options.gradients().begin(), options.gradients().end(), std::back_inserter(rules_), checked_rule);
  Names of_model;
  if (model != nullptr) {
    for (const auto& item : model->named_parameters()) {
      of_model.emplace(item.value().unsafeGetTensorImpl(), item.key());
    }
  }
  names_ = of_model;
  for (const CallSpec& spec : specs) {
    if (spec.module == nullptr) {
      continue;
    }
    for (const auto& item : spec.module->named_parameters()) {
      if (of_model.count(item.value().unsafeGetTensorImpl()) == 0) {
        names_.emplace(item.value().unsafeGetTensorImpl(), spec.name + "." + item.key());
      }
    }
  }
  check_patterns(specs);
}

void GradientPolicies::check_patterns(const std::vector<CallSpec>& specs) const {
  for (const GradientRule& rule : rules_) {
    const auto fits = [&](const std::string& name) { return name_matches(rule.pattern, name); };
    if (std::none_of(names_.begin(), names_.end(), [&](const auto& item) { return fits(item.second); }) &&
        std::none_of(specs.begin(), specs.end(), [&](const CallSpec& spec) { return fits(spec.name); })) {
      throw UsageError("GraphOptions::gradients: the pattern \"" + rule.pattern +
                       "\" matches no parameter of the model or of the captured calls; use dotted names of parameters, "
                       "such as blocks.*.weight");
    }
  }
}

GradientPolicy GradientPolicies::of(const CallSpec& spec, const at::Tensor& parameter) const {
  const auto [first, last] = names_.equal_range(parameter.unsafeGetTensorImpl());
  for (auto rule = rules_.rbegin(); rule != rules_.rend(); ++rule) {
    const bool fits =
        first == last
            ? name_matches(rule->pattern, spec.name)
            : std::any_of(first, last, [&](const auto& item) { return name_matches(rule->pattern, item.second); });
    if (fits) {
      return rule->policy;
    }
  }
  return GradientPolicy::cloned;
}

}  // namespace sidestream
