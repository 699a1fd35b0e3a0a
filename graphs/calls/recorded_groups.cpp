// The part of RecordedCalls that says which calls are captured together, and as what.
#include <algorithm>
#include <cstddef>
#include <vector>

#include <ATen/ops/zeros_like.h>

#include "graphs/calls/recorded_calls.h"

namespace sidestream {

std::vector<std::vector<std::size_t>> RecordedCalls::groups(std::size_t slot, bool evaluation) const {
  std::vector<std::size_t> among;
  const std::vector<bool> with_backward = log_->with_backward(calls_.size());
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    const RecordedCall& call = *calls_[i];
    const bool apart = call.order == nullptr || !with_backward[i];
    if (call.slot == slot && call.state.modes.gradients != evaluation && !call.captured && apart) {
      among.push_back(i);
    }
  }
  std::vector<std::vector<std::size_t>> groups = log_->groups(among);
  for (std::vector<std::size_t>& group : groups) {
    for (std::size_t& call : group) {
      call = among[call];
    }
  }
  return groups;
}

std::vector<std::size_t> RecordedCalls::in_order() const {
  std::vector<std::size_t> calls;
  const std::vector<bool> with_backward = log_->with_backward(calls_.size());
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    const RecordedCall& call = *calls_[i];
    if (call.order != nullptr && with_backward[i] && !call.captured &&
        (calls.empty() || call.order == calls_[calls.front()]->order)) {
      calls.push_back(i);
    }
  }
  return calls;
}

std::vector<bool> RecordedCalls::without_backward() const { return log_->without_backward(calls_.size()); }

std::vector<CallSpec> RecordedCalls::specs_of(const std::vector<std::size_t>& group, const MayLink& may_link) const {
  std::vector<CallSpec> specs;
  for (const std::size_t number : group) {
    const RecordedCall& call = *calls_[number];
    const CallSite& site = *call.site;
    specs.push_back(
        {site.scope->name, site.scope, call.body, call.module, call.inputs, call.state, site.hooks, site.generators});
    std::vector<CallInput>& inputs = specs.back().inputs;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      CallInput& input = inputs[i];
      if (!input.from) {
        continue;
      }
      const auto giver = std::lower_bound(group.begin(), group.end(), input.from->call);
      if (giver != group.end() && *giver == input.from->call && (!may_link || may_link(specs.size() - 1, i))) {
        input.from->call = static_cast<std::size_t>(giver - group.begin());
        continue;
      }
      input.from.reset();
      if (input.like.defined()) {
        input.sample = at::zeros_like(input.like, input.like.options().device(device_));
        input.sample.set_requires_grad(input.like.requires_grad());
      }
    }
  }
  return specs;
}

}  // namespace sidestream
