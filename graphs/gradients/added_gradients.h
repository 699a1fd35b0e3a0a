#pragma once
#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>

namespace sidestream {

/// For its lifetime, a backward pass adds the gradient of each of the leaves into that leaf's target as soon as the gradient is complete,
/// and frees it. The caller of torch::autograd::grad gets no gradient for that leaf. So one gradient is in memory at a time instead of
/// all of them, as when autograd accumulates itself.
///
/// The leaves have no hooks of their own during that time (LeafHookGuard).  Threads: begins and ends on one; autograd's threads add.
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
