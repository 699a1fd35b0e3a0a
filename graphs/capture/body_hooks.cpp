#include "graphs/capture/body_hooks.h"

#include <unordered_set>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include "graphs/gradients/gradient_leaves.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

using torch::autograd::Node;

bool has_hooks(Node& node) {
  return !node.tensor_pre_hooks().empty() || !node.pre_hooks().empty() || !node.post_hooks().empty();
}

class RefusedRun final : public torch::autograd::FunctionPreHook {
 public:
  explicit RefusedRun(std::string call) : call_(std::move(call)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& /*grads*/) override {
    throw UsageError(
        call_ +
        ": a backward pass reaches a tensor that the call made and keeps in a member, but does not return; a replay "
        "has no gradient for that tensor. Return it as an output of the call, or detach it before you keep it");
  }

 private:
  std::string call_;
};

/// Calls `visit` with each node of the autograd graph of `outputs`.
template <class Visit>
void for_each_node(const detail::TensorBuffer& outputs, const Visit& visit) {
  std::vector<Node*> open;
  std::unordered_set<Node*> seen;
  const auto meet = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) {
      open.push_back(node);
    }
  };
  for (const at::Tensor& output : outputs) {
    if (output.defined()) {
      meet(output.grad_fn().get());
    }
  }
  while (!open.empty()) {
    Node* const node = open.back();
    open.pop_back();
    visit(*node);
    for (const torch::autograd::Edge& edge : node->next_edges()) {
      meet(edge.function.get());
    }
  }
}

}  // namespace

bool has_hooks_of_body(const detail::TensorBuffer& outputs) {
  bool found = false;
  for_each_node(outputs, [&](Node& node) { found = found || has_hooks(node); });
  return found;
}

void refuse_hooks_of_body(const std::string& name, const std::vector<at::Tensor>& arguments,
                          const detail::TensorBuffer& outputs) {
  std::unordered_set<const Node*> given;  // an argument may be no leaf, as in plain training
  for (const at::Tensor& argument : arguments) {
    if (argument.defined() && argument.grad_fn() != nullptr) {
      given.insert(argument.grad_fn().get());
    }
  }
  for_each_node(outputs, [&](Node& node) {
    const bool from_outside =
        dynamic_cast<const torch::autograd::AccumulateGrad*>(&node) != nullptr || given.contains(&node);
    if (from_outside && has_hooks(node)) {
      throw CaptureError("callable \"" + name +
                         "\": it registers a gradient hook on an input or a parameter. In plain training such a hook "
                         "also gets gradients from outside of the call; register it outside of the call");
    }
    if (!node.retains_grad_hooks().empty()) {
      throw CaptureError("callable \"" + name +
                         "\": it calls retain_grad on a tensor that it made; a replay would not write that .grad. "
                         "Return the tensor as an output, and call retain_grad on the output");
    }
  });
}

void refuse_to_run(Node& node, const std::string& call) { node.add_pre_hook(std::make_unique<RefusedRun>(call)); }

void CapturedHistory::add(const std::string& call, const std::vector<at::Tensor>& leaves,
                          const std::vector<at::Tensor>& parameters, const detail::TensorBuffer& outputs) {
  for_each_node(outputs, [&](Node& node) {
    const auto* const leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(&node);
    if (leaf == nullptr || holds(leaves, leaf->variable) || holds(parameters, leaf->variable)) {
      nodes_.emplace_back(node.getptr(), call);
    }
  });
  // A tensor that the body keeps may lead to leaves without passing any output.
  for (const std::vector<at::Tensor>* const tensors : {&leaves, &parameters}) {
    for (const at::Tensor& tensor : *tensors) {
      if (!tensor.defined()) {
        continue;
      }
      if (auto accumulator = torch::autograd::impl::try_get_grad_accumulator(tensor); accumulator != nullptr) {
        nodes_.emplace_back(accumulator, call);
      }
    }
  }
}

void CapturedHistory::refuse_to_run() {
  std::unordered_set<const Node*> seen;
  for (const auto& [weak, call] : nodes_) {
    if (const auto node = weak.lock(); node != nullptr && seen.insert(node.get()).second) {
      sidestream::refuse_to_run(*node, call);
    }
  }
  nodes_.clear();
}

}  // namespace sidestream
