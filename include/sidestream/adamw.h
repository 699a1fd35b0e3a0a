#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include "sidestream/detail/export.h"

namespace sidestream {

/// As torch::optim::AdamWOptions, with its defaults. All but `lr` are frozen by a capture.
struct AdamWOptions {
  AdamWOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT: options are written as the learning rate
  TORCH_ARG(double, lr);
  using betas_t = std::tuple<double, double>;
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 1e-2;
  TORCH_ARG(bool, amsgrad) = false;
};

/// Parameters that are updated with the same options.
struct AdamWGroup {
  std::vector<at::Tensor> parameters;
  AdamWOptions options;
};

/// What AdamW keeps of one parameter, on its device.
struct AdamWState {
  at::Tensor parameter;
  at::Tensor step;            ///< how often it was updated: one float
  at::Tensor exp_avg;         ///< as the parameter lies
  at::Tensor exp_avg_sq;      ///< the same
  at::Tensor max_exp_avg_sq;  ///< the same; undefined without amsgrad
};

/// AdamW whose learning rate and step counts lie on the device, so that a captured update goes on counting and follows `set_lr`.
///
/// The arithmetic is torch::optim::AdamW's, as one fused operator for all parameters of a device and dtype: eager and replayed
/// updates are equal bit for bit, those of torch::optim::AdamW but for rounding (float: 1e-5 of the values).
/// State is made with the object, for every parameter that requires a gradient, and keeps its addresses.
/// Threads: one at a time.
/// Source: PyTorch's torch.optim.AdamW(fused=True, capturable=True).
class SIDESTREAM_API AdamW {
 public:
  /// Throws: UsageError for no parameters, one that comes twice, is undefined, no leaf or not floating-point, and for an option
  /// out of its range.
  explicit AdamW(std::vector<at::Tensor> parameters, AdamWOptions options = {});
  explicit AdamW(std::vector<AdamWGroup> groups);
  /// What was moved from throws UsageError.
  AdamW(AdamW&&) noexcept;
  AdamW& operator=(AdamW&&) noexcept;
  AdamW(const AdamW&) = delete;
  AdamW& operator=(const AdamW&) = delete;
  ~AdamW();

  /// Updates every parameter that has a gradient.  Ordering: work on the current stream.  Capture: legal.
  /// Throws: UsageError for a sparse gradient, and for one of a parameter that required none when this object was made.
  void step();
  /// Sets `.grad` of all parameters to none, or to zeros.  Capture: zeros alone are legal.
  void zero_grad(bool set_to_none = true);

  /// The learning rate of one group, or of all, from the next update on, captured ones too.
  /// Ordering: a write on the current stream.  Capture: illegal.
  /// Throws: UsageError for a rate that is negative or not finite, for a group that there is not, and in a capture.
  void set_lr(double lr);
  void set_lr(std::size_t group, double lr);
  /// As it was set last.
  [[nodiscard]] double lr(std::size_t group = 0) const;

  [[nodiscard]] std::size_t groups() const noexcept;
  /// Of the group's parameters that require a gradient, in their order.
  [[nodiscard]] const std::vector<AdamWState>& state(std::size_t group = 0) const;
  /// Names ("0.2.exp_avg": group, parameter among `state(group)`, tensor) and tensors, which are the state itself: for saving.
  [[nodiscard]] std::vector<std::pair<std::string, at::Tensor>> named_state() const;
  /// Copies what `named_state` gave into the state, in place, so that captured updates go on with it.
  /// Capture: illegal.  Throws: UsageError for a name that is missing or unknown, and for another shape; nothing is copied then.
  void load_state(const std::vector<std::pair<std::string, at::Tensor>>& state);

 private:
  class Updates;
  [[nodiscard]] Updates& updates() const;
  std::unique_ptr<Updates> updates_;
};

}  // namespace sidestream
