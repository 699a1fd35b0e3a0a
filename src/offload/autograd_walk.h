#pragma once
#include <type_traits>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

namespace sidestream {

/// Calls `visit(node)` once for each node of autograd's graph that can be reached from `roots`, the roots included. Null roots are
/// skipped. If `visit` returns false, the walk does not follow that node's edges.
/// Threads: one; no backward pass that frees these nodes may run meanwhile.
template <class Visit>
void walk_autograd(const std::vector<torch::autograd::Node*>& roots, const Visit& visit) {
  using torch::autograd::Node;
  std::vector<Node*> open;
  std::unordered_set<const Node*> seen;
  const auto meet = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) {
      open.push_back(node);
    }
  };
  for (Node* const root : roots) {
    meet(root);
  }
  while (!open.empty()) {
    Node* const node = open.back();
    open.pop_back();
    if constexpr (std::is_void_v<decltype(visit(*node))>) {
      visit(*node);
    } else if (!visit(*node)) {
      continue;
    }
    for (const torch::autograd::Edge& edge : node->next_edges()) {
      meet(edge.function.get());
    }
  }
}

/// The nodes that made `tensors`. Tensors without history have none.
[[nodiscard]] inline std::vector<torch::autograd::Node*> makers_of(c10::ArrayRef<at::Tensor> tensors) {
  std::vector<torch::autograd::Node*> nodes;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.grad_fn() != nullptr) {
      nodes.push_back(tensor.grad_fn().get());
    }
  }
  return nodes;
}

/// The nodes to which `edges` lead.
[[nodiscard]] inline std::vector<torch::autograd::Node*> nodes_of(const torch::autograd::edge_list& edges) {
  std::vector<torch::autograd::Node*> nodes;
  for (const torch::autograd::Edge& edge : edges) {
    nodes.push_back(edge.function.get());
  }
  return nodes;
}

/// The leaf whose gradient `node` accumulates. Null for any other node, and for null.
[[nodiscard]] inline const at::Tensor* leaf_of(const torch::autograd::Node* node) {
  const auto* accumulator = dynamic_cast<const torch::autograd::AccumulateGrad*>(node);
  return accumulator == nullptr ? nullptr : &accumulator->variable;
}

/// True if hooks run before or after `node` in a backward. Hooks of retain_grad do not count.
[[nodiscard]] inline bool has_hooks(torch::autograd::Node& node) {
  return !node.tensor_pre_hooks().empty() || !node.pre_hooks().empty() || !node.post_hooks().empty();
}

}  // namespace sidestream
