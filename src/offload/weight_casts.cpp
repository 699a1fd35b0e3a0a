#include "offload/weight_casts.h"

#include <torch/csrc/autograd/function.h>

#include "offload/autograd_walk.h"

namespace sidestream {

bool is_weight_cast(const at::Tensor& saved) {
  if (!saved.requires_grad() || saved.is_leaf()) {
    return false;
  }
  // Linear saves `weight_cast.t()`, whose grad_fn is the transposition's.
  const at::TensorBase& copy = saved.is_view() ? saved._base() : saved;
  const auto& made_by = copy.grad_fn();
  if (made_by == nullptr || made_by->num_outputs() != 1) {
    return false;
  }
  // A leaf that requires grad hangs in the graph by its AccumulateGrad node.
  const at::Tensor* const leaf = leaf_of(made_by->next_edge(0).function.get());
  return leaf != nullptr && leaf->scalar_type() != copy.scalar_type() && leaf->sizes() == copy.sizes();
}

}  // namespace sidestream
