#pragma once
#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>

namespace sidestream {

/// For its lifetime, adds the gradient that a backward pass computes for a leaf into that leaf's target as soon as the gradient is
/// complete, and frees it. The caller of torch::autograd::grad gets no gradient for the leaf. So only one gradient is in memory at a
/// time, as if autograd accumulated.
///
/// The leaves must have no other hooks meanwhile (Sandbox::hide_hooks).  Threads: begins and ends on one; autograd's threads add.
class [[nodiscard]] AddedGradients {
 public:
  /// `targets`: one for each of `leaves`, which are distinct.
  AddedGradients(std::vector<at::Tensor> leaves, const std::vector<at::Tensor>& targets);
  AddedGradients(const AddedGradients&) = delete;
  AddedGradients& operator=(const AddedGradients&) = delete;
  ~AddedGradients();

  /// True if the leaf of that index got a gradient. Call it after the backward has ended.
  [[nodiscard]] bool has(std::size_t index) const noexcept { return added_[index] != 0; }

 private:
  std::vector<at::Tensor> leaves_;
  std::vector<char> added_;  // each written by one hook
};

}  // namespace sidestream
