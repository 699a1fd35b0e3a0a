#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace sidestream::cli {

/// Parameters with their names, in the order of `named_parameters`.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Gradients of two runs of the same steps, compared parameter by parameter.
class GradientComparison {
 public:
  struct Parameter {
    std::string name;
    std::int64_t differing_steps = 0;
    double worst_error = 0;  ///< largest |a - b| / |b| (Euclidean norms over the parameter) of a step
  };

  /// `tokens` is how many terms a weight's gradient sums. `exact` says that the same operators ran on the same bytes, so that nothing but
  /// equality will do.
  GradientComparison(at::ScalarType dtype, std::int64_t tokens, bool exact);

  /// Compares the gradients of `ours` with those of `reference`, both after one backward of the same step. A gradient that only
  /// one side has counts as differing without bound. Returns true when all are equal bit for bit (zeros of either sign are equal).
  bool compare(const NamedTensors& ours, const NamedTensors& reference);

  [[nodiscard]] std::int64_t steps() const noexcept { return steps_; }
  [[nodiscard]] bool all_equal() const noexcept;
  /// The relative error that another order of summation may cause; 0 when only equality will do.
  [[nodiscard]] double bound() const noexcept { return bound_; }
  [[nodiscard]] bool within_bound() const noexcept;
  [[nodiscard]] const std::vector<Parameter>& parameters() const noexcept { return parameters_; }
  /// Why a difference within the bound is no error, one line; empty when only equality will do.
  [[nodiscard]] std::string explanation() const;

 private:
  at::ScalarType dtype_;
  std::int64_t tokens_;
  double bound_;
  std::int64_t steps_ = 0;
  std::vector<Parameter> parameters_;
};

}  // namespace sidestream::cli
