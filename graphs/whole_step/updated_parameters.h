#pragma once
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace sidestream {

/// While it lives, which parameters AdamW and clip_grad_norm_ are given on this thread, with a gradient or without: an operator shows
/// only those with one.  Threads: ends on the thread it began on.
class [[nodiscard]] UpdatedParameters {
 public:
  UpdatedParameters() : outer_(std::exchange(current(), this)) {}
  UpdatedParameters(const UpdatedParameters&) = delete;
  UpdatedParameters& operator=(const UpdatedParameters&) = delete;
  ~UpdatedParameters() { current() = outer_; }

  /// Who listens on this thread; null where nobody does.
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
