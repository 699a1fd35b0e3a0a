#pragma once
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "graphs/guards/call_spec.h"
#include "sidestream/detail/module_forward.h"
#include "sidestream/graph_options.h"

namespace sidestream {

/// Which policy the gradients of the parameters of one sequence's calls have: see GraphOptions::gradients.
class GradientPolicies {
 public:
  /// `model`: the engine's, or null. Throws: UsageError for a pattern that fits no parameter of the model or of the calls' modules,
  /// and no call.
  GradientPolicies(const GraphOptions& options, const torch::nn::Module* model, const std::vector<CallSpec>& specs);

  [[nodiscard]] GradientPolicy of(const CallSpec& spec, const at::Tensor& parameter) const;

 private:
  using Names = std::unordered_multimap<const c10::TensorImpl*, std::string>;
  void check_patterns(const std::vector<CallSpec>& specs) const;

  std::vector<GradientRule> rules_;
  Names names_;  ///< one parameter may have several
};

}  // namespace sidestream
