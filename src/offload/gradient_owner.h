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

/// Call it for a backward that was asked for the gradients of `wanted` only. If a node owns a leaf's gradient, autograd sees no path from
/// `roots` to that leaf. It would report the leaf as unused, or omit its gradient.
/// Throws: UsageError if such a node lies on the way. If no owner is alive, it costs one load.
void refuse_owned_gradients(const torch::autograd::edge_list& roots, const torch::autograd::edge_list& wanted);

}  // namespace sidestream
