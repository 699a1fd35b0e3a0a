#include "offload/weight_casts.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

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
  const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(made_by->next_edge(0).function.get());
  return leaf != nullptr && leaf->variable.scalar_type() != copy.scalar_type() &&
         leaf->variable.sizes() == copy.sizes();
}

}  // namespace sidestream
