#include "graphs/calls/call_dependencies.h"

#include <set>
#include <unordered_set>
#include <utility>

#include <torch/csrc/autograd/function.h>

namespace sidestream {

std::vector<std::size_t> CallDependencies::of(c10::ArrayRef<at::Tensor> inputs) const {
  std::set<std::size_t> calls;
  if (!givers_.empty()) {
    std::vector<const torch::autograd::Node*> open;
    std::unordered_set<const torch::autograd::Node*> seen;
    const auto visit = [&](const torch::autograd::Node* node) {
      if (node != nullptr && seen.insert(node).second) {
        open.push_back(node);
      }
    };
    for (const at::Tensor& input : inputs) {
      if (input.defined()) {
        visit(input.grad_fn().get());
      }
    }
    while (!open.empty()) {
      const torch::autograd::Node* const node = open.back();
      open.pop_back();
      if (const auto giver = givers_.find(node); giver != givers_.end() && !giver->second.alive.expired()) {
        calls.insert(giver->second.call);
        if (const auto before = from_.find(giver->second.call); before != from_.end()) {
          calls.insert(before->second.begin(), before->second.end());
        }
        continue;  // what lies behind it is known
      }
      for (const torch::autograd::Edge& edge : node->next_edges()) {
        visit(edge.function.get());
      }
    }
  }
  return {calls.begin(), calls.end()};
}

void CallDependencies::add(std::size_t call, std::vector<std::size_t> from, c10::ArrayRef<at::Tensor> outputs) {
  for (const at::Tensor& output : outputs) {
    if (output.defined() && output.grad_fn() != nullptr) {
      givers_.insert_or_assign(output.grad_fn().get(), Giver{output.grad_fn(), call});
    }
  }
  from_.insert_or_assign(call, std::move(from));
}

void CallDependencies::clear() noexcept {
  givers_.clear();
  from_.clear();
}

}  // namespace sidestream
