#include "graphs/capture/body_hooks.h"

#include <unordered_set>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "graphs/gradients/gradient_leaves.h"
#include "offload/autograd_walk.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

using torch::autograd::Node;

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

}  // namespace

bool has_hooks_of_body(const detail::TensorBuffer& outputs) {
  bool found = false;
  walk_autograd(makers_of(outputs), [&](Node& node) { found = found || has_hooks(node); });
  return found;
}

void refuse_hooks_of_body(const std::string& name, const std::vector<at::Tensor>& arguments,
                          const std::vector<at::Tensor>& hidden, const detail::TensorBuffer& outputs) {
  // An argument may be no leaf, as in plain training.
  const std::vector<Node*> makers = makers_of(arguments);
  const std::unordered_set<const Node*> given(makers.begin(), makers.end());
  walk_autograd(makers_of(outputs), [&](Node& node) {
    const at::Tensor* const leaf = leaf_of(&node);
    if ((given.contains(&node) || (leaf != nullptr && holds(hidden, *leaf))) && has_hooks(node)) {
      throw CaptureError("graphed call \"" + name +
                         "\": it registers a gradient hook on an input or a parameter. In plain training such a hook "
                         "also gets gradients from outside of the call; register it outside of the call");
    }
    if (!node.retains_grad_hooks().empty()) {
      throw CaptureError("graphed call \"" + name +
                         "\": it calls retain_grad on a tensor that it made; a replay would not write that .grad. "
                         "Return the tensor as an output, and call retain_grad on the output");
    }
  });
}

void refuse_to_run(Node& node, const std::string& call) { node.add_pre_hook(std::make_unique<RefusedRun>(call)); }

void CapturedHistory::add(const std::string& call, const std::vector<at::Tensor>& leaves,
                          const std::vector<at::Tensor>& parameters, const detail::TensorBuffer& outputs) {
  walk_autograd(makers_of(outputs), [&](Node& node) {
    const at::Tensor* const leaf = leaf_of(&node);
    if (leaf == nullptr || holds(leaves, *leaf) || holds(parameters, *leaf)) {
      nodes_.emplace_back(node.getptr(), call);
    }
  });
  // A tensor that the module keeps may lead to leaves without passing an output.
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
