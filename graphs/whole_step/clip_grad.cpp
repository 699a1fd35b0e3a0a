#include "sidestream/clip_grad.h"

#include <cmath>
#include <string>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include "graphs/whole_step/whole_step_watch.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// LibTorch adds this to the norm before it divides.
constexpr double kEpsilon = 1e-6;

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  UpdatedParameters* const listener = UpdatedParameters::current();
  for (const at::Tensor& parameter : parameters) {
    if (listener != nullptr && parameter.defined()) {
      listener->add(parameter);
    }
    const at::Tensor gradient = parameter.defined() ? parameter.grad() : at::Tensor();
    if (!gradient.defined()) {
      continue;
    }
    if (gradient.layout() != at::kStrided) {
      throw UsageError("clip_grad_norm_: a gradient is not dense; clip dense gradients only");
    }
    if (!gradients.empty() && gradients.front().device() != gradient.device()) {
      throw UsageError("clip_grad_norm_: gradients lie on " + gradients.front().device().str() + " and on " +
                       gradient.device().str() + "; clip those of one device");
    }
    gradients.push_back(gradient);
  }
  return gradients;
}

at::Tensor total_norm(const std::vector<at::Tensor>& gradients, double norm_type) {
  if (norm_type == 0) {  // as LibTorch has it: the number of gradients
    return at::full({}, static_cast<double>(gradients.size()), gradients.front().options().dtype(at::kFloat));
  }
  const std::vector<at::Tensor> norms = at::_foreach_norm(gradients, norm_type);
  return norms.size() == 1 ? norms.front() : at::linalg_vector_norm(at::stack(norms), norm_type);
}

}  // namespace

at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type) {
  if (std::isnan(max_norm) || max_norm < 0 || std::isnan(norm_type)) {
    throw UsageError("clip_grad_norm_: max_norm is " + std::to_string(max_norm) + " and norm_type " +
                     std::to_string(norm_type) + "; max_norm is at least 0 and neither is nan");
  }
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> gradients = gradients_of(parameters);
  if (gradients.empty()) {
    return parameters.empty() || !parameters.front().defined()
               ? at::zeros({})
               : at::zeros({}, parameters.front().options().dtype(at::kFloat).requires_grad(false));
  }
  at::Tensor norm = total_norm(gradients, norm_type);
  const at::Tensor factor = at::clamp(at::full_like(norm, max_norm).div_(norm.add(kEpsilon)), std::nullopt, 1.0);
  at::_foreach_mul_(gradients, factor);
  return norm;
}

}  // namespace sidestream
