#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

namespace sidestream {

/// A node of autograd's graph that may add into the `.grad` of leaves itself, with no edge to them.
/// Threads: any.
class GradientOwner {
 public:
  GradientOwner() noexcept;
  GradientOwner(const GradientOwner&) = delete;
  GradientOwner& operator=(const GradientOwner&) = delete;
  virtual ~GradientOwner();

  [[nodiscard]] virtual bool owns_gradient_of(const at::Tensor& leaf) const = 0;
};

/// For a backward that was asked for the gradients of `wanted` alone: autograd sees no way from `roots` to a leaf whose
/// gradient a node owns, and would say that it was not used, or leave its gradient out.
/// Throws: UsageError where such a node lies on the way. With no owner alive it costs one load.
void refuse_owned_gradients(const torch::autograd::edge_list& roots, const torch::autograd::edge_list& wanted);

}  // namespace sidestream
