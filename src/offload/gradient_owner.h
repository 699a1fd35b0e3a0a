#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

namespace sidestream {

/// A node of autograd's graph that may add into the `.grad` of leaves itself, without an edge to them.
/// Threads: any.
class GradientOwner {
 public:
  GradientOwner() noexcept;
  GradientOwner(const GradientOwner&) = delete;
  GradientOwner& operator=(const GradientOwner&) = delete;
  virtual ~GradientOwner();

  [[nodiscard]] virtual bool owns_gradient_of(const at::Tensor& leaf) const = 0;
};

/// Checks a backward that was asked for the gradients of `wanted` only. Autograd has no edge from `roots` to a leaf whose gradient a
/// node owns. It would report the leaf as unused, or leave its gradient out. If no owner is alive, the check costs one load.
/// Throws: UsageError if `roots` lead to a node that owns the gradient of one of `wanted`.
void refuse_owned_gradients(const torch::autograd::edge_list& roots, const torch::autograd::edge_list& wanted);

}  // namespace sidestream
