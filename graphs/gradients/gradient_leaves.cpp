#include "graphs/gradients/gradient_leaves.h"

#include <algorithm>
#include <unordered_map>

#include <torch/csrc/autograd/variable.h>

#include "offload/autograd_walk.h"

namespace sidestream {

bool holds(const std::vector<at::Tensor>& tensors, const at::Tensor& tensor) {
  return std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& t) { return t.is_same(tensor); });
}

bool backward_may_begin_from(const at::Tensor& output) {
  if (!output.requires_grad() || !output.is_leaf()) {
    return output.requires_grad();
  }
  const auto* const meta = torch::autograd::impl::get_autograd_meta(output);
  return meta != nullptr && meta->requires_grad_;
}

std::vector<at::Tensor> requiring(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.requires_grad() && !holds(result, tensor)) {
      result.push_back(tensor);
    }
  }
  return result;
}

std::vector<OutputSet> gradient_routes(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& targets) {
  std::unordered_map<const c10::TensorImpl*, std::size_t> indices;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    indices.emplace(targets[i].unsafeGetTensorImpl(), i);
  }
  std::vector<OutputSet> routes(targets.size(), 0);
  for (std::size_t output = 0; output < outputs.size(); ++output) {
    walk_autograd(makers_of(outputs[output]), [&](const torch::autograd::Node& node) {
      if (const at::Tensor* const leaf = leaf_of(&node); leaf != nullptr) {
        if (const auto found = indices.find(leaf->unsafeGetTensorImpl()); found != indices.end()) {
          routes[found->second] |= output_bit(output);
        }
      }
    });
  }
  return routes;
}

at::Tensor leaf_itself(const at::Tensor& leaf) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(leaf);
  const at::Tensor* const own = leaf_of(accumulator.get());
  return own == nullptr ? leaf : *own;
}

}  // namespace sidestream
