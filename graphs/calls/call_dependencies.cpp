#include <set>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/function.h>

#include "graphs/calls/recorded_calls.h"
#include "offload/autograd_walk.h"

namespace sidestream {

std::vector<std::size_t> CallDependencies::of(c10::ArrayRef<at::Tensor> inputs) const {
  std::set<std::size_t> calls;
  if (!givers_.empty()) {
    walk_autograd(makers_of(inputs), [&](const torch::autograd::Node& node) {
      const auto giver = givers_.find(&node);
      if (giver == givers_.end() || giver->second.alive.expired()) {
        return true;
      }
      calls.insert(giver->second.call);
      if (const auto before = from_.find(giver->second.call); before != from_.end()) {
        calls.insert(before->second.begin(), before->second.end());
      }
      return false;  // all calls before this one are known
    });
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
