#include "graphs/gradients/gradient_leaves.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

namespace sidestream {

bool holds(const std::vector<at::Tensor>& tensors, const at::Tensor& tensor) {
  return std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& t) { return t.is_same(tensor); });
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
  using torch::autograd::Node;
  std::unordered_map<const c10::TensorImpl*, std::size_t> indices;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    indices.emplace(targets[i].unsafeGetTensorImpl(), i);
  }
  std::vector<OutputSet> routes(targets.size(), 0);
  for (std::size_t output = 0; output < outputs.size(); ++output) {
    std::unordered_set<Node*> seen;
    std::vector<Node*> open;
    const auto visit = [&](Node* node) {
      if (node != nullptr && seen.insert(node).second) {
        open.push_back(node);
      }
    };
    if (outputs[output].defined()) {
      visit(outputs[output].grad_fn().get());
    }
    while (!open.empty()) {
      Node* const node = open.back();
      open.pop_back();
      if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node); leaf != nullptr) {
        if (const auto found = indices.find(leaf->variable.unsafeGetTensorImpl()); found != indices.end()) {
          routes[found->second] |= output_bit(output);
        }
      }
      for (const torch::autograd::Edge& edge : node->next_edges()) {
        visit(edge.function.get());
      }
    }
  }
  return routes;
}

at::Tensor leaf_itself(const at::Tensor& leaf) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(leaf);
  const auto* own = dynamic_cast<const torch::autograd::AccumulateGrad*>(accumulator.get());
  return own == nullptr ? leaf : own->variable;
}

}  // namespace sidestream
