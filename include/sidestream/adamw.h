#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include "sidestream/detail/export.h"

namespace sidestream {

/// Options as in torch::optim::AdamWOptions, with its defaults. A capture freezes all but `lr`.
///
/// Each option is a chained setter; without an argument it gives the value.
struct AdamWOptions {
  /// Options with this learning rate.
  AdamWOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT: options are written as the learning rate
  /// Learning rate, finite and at least 0.
  TORCH_ARG(double, lr);
  /// Type of `betas`.
  using betas_t = std::tuple<double, double>;
  /// Decay rates of the averages of the gradient and of its square, each at least 0 and less than 1.
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  /// Term that is added to the denominator, at least 0.
  TORCH_ARG(double, eps) = 1e-8;
  /// Decoupled weight decay, at least 0.
  TORCH_ARG(double, weight_decay) = 1e-2;
  /// Divides by the maximum of all past averages of the squared gradient.
  TORCH_ARG(bool, amsgrad) = false;
};

/// Parameters that are updated with the same options.
struct AdamWGroup {
  std::vector<at::Tensor> parameters;  ///< leaves, each in one group only
  AdamWOptions options;                ///< for all of them
};

/// What AdamW keeps for one parameter, on the parameter's device.
struct AdamWState {
  at::Tensor parameter;       ///< the parameter itself
  at::Tensor step;            ///< number of updates: a float tensor without dimensions
  at::Tensor exp_avg;         ///< average of the gradient, with the shape and strides of the parameter
  at::Tensor exp_avg_sq;      ///< average of the squared gradient, likewise
  at::Tensor max_exp_avg_sq;  ///< maximum of `exp_avg_sq`, likewise; undefined without amsgrad
};

/// AdamW whose learning rate and step counts are on the device, so that a captured update counts its steps and follows `set_lr`.
///
/// The arithmetic is that of torch::optim::AdamW, as one fused operator for all parameters of a group, device and dtype. Eager and replayed
/// updates are equal bit for bit. They equal those of torch::optim::AdamW except for rounding (float: 1e-5 of the values).
/// The constructor makes the state of every parameter that requires a gradient; its addresses never change.
/// Threads: one at a time.
/// Source: PyTorch's torch.optim.AdamW(fused=True, capturable=True).
class SIDESTREAM_API AdamW {
 public:
  /// One group.  Throws: UsageError without parameters, for an option out of its range, and for a parameter that is given twice. Also for a
  /// parameter that is undefined, not a leaf, not dense or not floating-point.
  explicit AdamW(std::vector<at::Tensor> parameters, AdamWOptions options = {});
  /// Several groups.  Throws: as above.
  explicit AdamW(std::vector<AdamWGroup> groups);
  /// Functions of an object that was moved from throw UsageError.
  AdamW(AdamW&&) noexcept;
  /// Functions of the object on the right throw UsageError afterwards.
  AdamW& operator=(AdamW&&) noexcept;
  AdamW(const AdamW&) = delete;
  AdamW& operator=(const AdamW&) = delete;
  ~AdamW();

  /// Updates every parameter that has a gradient.  Ordering: work on the current stream.  Capture: legal.
  /// Throws: UsageError for a sparse gradient, and for a gradient of a parameter that required none when this object was made.
  void step();
  /// Unsets or zeros `.grad` of the parameters that required a gradient when this object was made.  Capture: legal only if it zeros.
  void zero_grad(bool set_to_none = true);

  /// Sets the learning rate of all groups, from the next update on. Captured updates follow it.
  /// Ordering: a write on the current stream.  Capture: illegal.
  /// Throws: UsageError for a rate that is negative or not finite, and in a capture.
  void set_lr(double lr);
  /// Sets the learning rate of one group, as above.  Throws: also UsageError for a group that does not exist.
  void set_lr(std::size_t group, double lr);
  /// The learning rate that was set last. Does not synchronise.  Throws: UsageError for a group that does not exist.
  [[nodiscard]] double lr(std::size_t group = 0) const;

  /// Number of groups.
  [[nodiscard]] std::size_t groups() const noexcept;
  /// State of the group's parameters that require a gradient, in their order.
  [[nodiscard]] const std::vector<AdamWState>& state(std::size_t group = 0) const;
  /// Names and tensors of the state, for saving. The tensors are the state itself. A name such as "0.2.exp_avg" gives the group, the index
  /// in `state(group)`, and the tensor. Learning rates and other options are not part of it: after `load_state`, set the rate with
  /// `set_lr`.
  [[nodiscard]] std::vector<std::pair<std::string, at::Tensor>> named_state() const;
  /// Copies the tensors of a `named_state` into the state, in place, so that captured updates continue from it.
  /// Capture: illegal.  Throws: UsageError for a name that is missing or unknown, and for another shape; nothing is copied then.
  void load_state(const std::vector<std::pair<std::string, at::Tensor>>& state);

 private:
  class Updates;
  [[nodiscard]] Updates& updates() const;
  std::unique_ptr<Updates> updates_;
};

}  // namespace sidestream
