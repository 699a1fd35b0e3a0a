#include "tools/cli/gradient_comparison.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <fmt/format.h>

#include "sidestream/error.h"

namespace sidestream::cli {
namespace {

constexpr double kFloatEpsilon = 0x1p-23;
constexpr double kBfloat16Epsilon = 0x1p-7;

// Two orders of one sum of n terms, accumulated in float, differ by about epsilon * sqrt(n); a result stored in bfloat16 may then
// round to its neighbour. Four times that leaves room for the layers that the difference passes through.
double reordering_bound(at::ScalarType dtype, std::int64_t tokens) {
  const double stored = dtype == at::kBFloat16 ? kBfloat16Epsilon : 0.0;
  return 4 * (stored + kFloatEpsilon * std::sqrt(static_cast<double>(tokens)));
}

double relative_error(const at::Tensor& ours, const at::Tensor& reference) {
  const at::Tensor b = reference.to(at::kDouble);
  const double scale = b.norm().item<double>();
  const double error = (ours.to(at::kDouble) - b).norm().item<double>();
  const double relative = scale > 0 ? error / scale : error;
  return std::isnan(relative) ? std::numeric_limits<double>::infinity() : relative;
}

at::Tensor on_host(const at::Tensor& tensor) { return tensor.defined() ? tensor.detach().to(at::kCPU) : at::Tensor(); }

}  // namespace

GradientComparison::GradientComparison(at::ScalarType dtype, std::int64_t tokens, bool exact)
    : dtype_(dtype), tokens_(tokens), bound_(exact ? 0 : reordering_bound(dtype, tokens)) {}

bool GradientComparison::compare(const NamedTensors& ours, const NamedTensors& reference) {
  if (ours.size() != reference.size()) {
    throw UsageError(fmt::format("{} parameters cannot be compared with {}", ours.size(), reference.size()));
  }
  if (parameters_.empty()) {
    for (const auto& [name, tensor] : ours) {
      parameters_.push_back({name});
    }
  }
  ++steps_;
  bool equal = true;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    const at::Tensor a = on_host(ours[i].second.grad());
    const at::Tensor b = on_host(reference[i].second.grad());
    if (a.defined() == b.defined() && (!a.defined() || at::equal(a, b))) {
      continue;
    }
    equal = false;
    const double error = a.defined() && b.defined() ? relative_error(a, b) : std::numeric_limits<double>::infinity();
    ++parameters_[i].differing_steps;
    parameters_[i].worst_error = std::max(parameters_[i].worst_error, error);
  }
  return equal;
}

bool GradientComparison::all_equal() const noexcept {
  return std::all_of(parameters_.begin(), parameters_.end(), [](const Parameter& p) { return p.differing_steps == 0; });
}

bool GradientComparison::within_bound() const noexcept {
  return std::all_of(parameters_.begin(), parameters_.end(),
                     [&](const Parameter& p) { return p.worst_error <= bound_; }) &&
         (bound_ > 0 || all_equal());
}

std::string GradientComparison::explanation() const {
  if (bound_ == 0) {
    return {};
  }
  return fmt::format(
      "inside a graph, the device's libraries may add the same {} terms in another order; with {} this may change a "
      "gradient by {:.1e} of its norm",
      tokens_, c10::toString(dtype_), bound_);
}

}  // namespace sidestream::cli
