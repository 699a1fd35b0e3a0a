#pragma once
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "observe/operator_observer.h"
#include "runtime/weak_storage_set.h"

namespace sidestream {

/// Watches the warm-up of a whole step for what its graph would freeze or cannot do, and refuses it by name. Such are optimizers that keep
/// a step count on the host, state that an update makes for itself, and values that are read on the host.
/// Threads: one.
class WholeStepWatch {
 public:
  /// `name`: of the step.
  explicit WholeStepWatch(std::string name) : name_(std::move(name)) {}

  /// A run of the step begins, for its capture or before. `parameters`: those that an update may write.
  void begin_pass(std::vector<at::Tensor> parameters, bool captures);
  /// `parameters`: as of begin_pass, with those that the losses led to.
  void update_begins(std::vector<at::Tensor> parameters) noexcept {
    parameters_ = std::move(parameters);
    updating_ = true;
  }
  /// Before an operator runs. Throws: CaptureError.
  void before(const OperatorAccess& access) const;
  /// After it.
  void after(const OperatorAccess& access);

 private:
  void refuse_frozen_gradient(const OperatorAccess& access) const;
  [[nodiscard]] bool writes_parameter(const OperatorAccess& access) const;

  std::string name_;
  std::vector<at::Tensor> parameters_;
  bool captures_ = false;
  bool updating_ = false;
  WeakStorageSet made_by_updates_;  ///< of earlier passes
  WeakStorageSet made_by_update_;   ///< of this one
};

/// Collects, for its lifetime, the parameters that AdamW and clip_grad_norm_ are given on this thread, also those without a gradient, which
/// no operator shows.  Threads: ends on the thread it began on.
class [[nodiscard]] UpdatedParameters {
 public:
  UpdatedParameters() : outer_(std::exchange(current(), this)) {}
  UpdatedParameters(const UpdatedParameters&) = delete;
  UpdatedParameters& operator=(const UpdatedParameters&) = delete;
  ~UpdatedParameters() { current() = outer_; }

  /// The collector of this thread; null if there is none.
  [[nodiscard]] static UpdatedParameters*& current() noexcept {
    static thread_local UpdatedParameters* listener = nullptr;
    return listener;
  }
  void add(const at::Tensor& parameter) { parameters_.push_back(parameter); }
  [[nodiscard]] const std::vector<at::Tensor>& parameters() const noexcept { return parameters_; }

 private:
  UpdatedParameters* outer_;
  std::vector<at::Tensor> parameters_;
};

}  // namespace sidestream
