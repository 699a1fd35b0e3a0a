#pragma once
#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>

namespace sidestream {

/// For its lifetime, what a backward pass computes as the gradient of one of the leaves is added into that leaf's target as soon as
/// it is whole, and let go of. The caller of torch::autograd::grad gets none for it. So one gradient is in memory at a time, as
/// where autograd accumulates itself, and not all of them.
///
/// The leaves have no hooks of their own meanwhile (LeafHookGuard).  Threads: begins and ends on one; autograd's add.
class [[nodiscard]] AddedGradients {
 public:
  /// `targets`: one for each of `leaves`, which are distinct.
  AddedGradients(std::vector<at::Tensor> leaves, const std::vector<at::Tensor>& targets);
  AddedGradients(const AddedGradients&) = delete;
  AddedGradients& operator=(const AddedGradients&) = delete;
  ~AddedGradients();

  /// Whether the leaf of that index got one. Of a backward that has ended.
  [[nodiscard]] bool has(std::size_t index) const noexcept { return added_[index] != 0; }

 private:
  std::vector<at::Tensor> leaves_;
  std::vector<char> added_;  // each written by one hook
};

}  // namespace sidestream
