#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "graphs/sequence/replay_node.h"
#include "graphs/verify/verified_call.h"
#include "observe/sync_finder.h"
#include "offload/saved_tensor_recorder.h"

namespace sidestream {
namespace {

using torch::autograd::variable_list;

}  // namespace

/// A hook on the replay's node. It copies `.grad` before the backward graph adds into it, and states of generators before it draws.
class VerifiedCall::BeforeBackward final : public ReplayNode::KeepsNoGradient {
 public:
  explicit BeforeBackward(std::shared_ptr<VerifiedCall> call) : call_(std::move(call)) {}
  variable_list operator()(const variable_list& grads) override {
    call_->keep_before_backward();
    return grads;
  }

 private:
  std::shared_ptr<VerifiedCall> call_;
};

/// A hook on the replay's node. It compares the node's results before another graph is launched: until then the graph's inputs, also the
/// static gradients of the graph before, are unchanged.
class VerifiedCall::AfterBackward final : public torch::autograd::FunctionPostHook {
 public:
  explicit AfterBackward(std::shared_ptr<VerifiedCall> call) : call_(std::move(call)) {}
  ~AfterBackward() override { call_->drop(); }
  variable_list operator()(const variable_list& results, const variable_list& grads) override {
    call_->compare_backward(results, grads);
    return results;
  }

 private:
  std::shared_ptr<VerifiedCall> call_;
};

void VerifiedCall::await_backward(torch::autograd::Node& node) {
  awaits_backward_ = true;
  node.add_pre_hook(std::make_unique<BeforeBackward>(shared_from_this()));
  node.add_post_hook(std::make_unique<AfterBackward>(shared_from_this()));
}

void VerifiedCall::keep_before_backward() {
  const std::lock_guard lock(mutex_);
  if (!awaits_backward_) {
    return;
  }
  before_backward_ = std::vector<GeneratorState>(generators_.begin(), generators_.end());
  const at::NoGradGuard no_grad;
  for (Target& target : targets_) {
    if (target.added) {
      const at::Tensor& grad = target.leaf.grad();
      target.grad_before = grad.defined() ? grad.clone() : at::zeros_like(target.leaf);
    }
  }
}

std::vector<at::Tensor> VerifiedCall::eager_gradients(const std::vector<at::Tensor>& grads) {
  torch::autograd::edge_list roots;
  variable_list seeds;
  std::size_t given = 0;
  for (const at::Tensor& output : outputs_) {
    if (output.defined() && output.requires_grad()) {
      if (const at::Tensor& grad = grads.at(given++); grad.defined()) {
        roots.push_back(torch::autograd::impl::gradient_edge(output));
        seeds.push_back(grad.detach());
      }
    }
  }
  torch::autograd::edge_list edges;
  std::vector<at::Tensor> leaves;
  for (const Target& target : targets_) {
    edges.push_back(target.edge);
    leaves.push_back(target.leaf);
  }
  if (roots.empty() || edges.empty()) {
    return std::vector<at::Tensor>(edges.size());
  }
  const RecorderGuard no_recorder(nullptr);
  Sandbox sandbox;
  sandbox.hide_hooks(leaves);
  hold(sandbox);
  for (const GeneratorState& state : before_backward_) {
    state.put_back();  // the eager backward draws what the replay drew
  }
  // Keeps the autograd graph: other graphs may share nodes of it (a weight's cast).
  variable_list made =
      torch::autograd::Engine::get_default_engine().execute(roots, seeds, /*keep_graph=*/true, /*create_graph=*/false,
                                                            /*accumulate_grad=*/false, edges);
  sandbox.check();
  return made;
}

void VerifiedCall::compare_backward(const std::vector<at::Tensor>& results, const std::vector<at::Tensor>& grads) {
  const std::lock_guard lock(mutex_);
  if (!awaits_backward_) {
    return;  // dropped, or a second backward
  }
  awaits_backward_ = false;
  const SyncFinder::Pause compares;
  const std::vector<at::Tensor> eager = eager_gradients(grads);
  outputs_.clear();
  const bool any_delayed =
      std::any_of(targets_.begin(), targets_.end(), [](const Target& target) { return target.delayed.has_value(); });
  const std::vector<at::Tensor> late = any_delayed ? delayed_() : std::vector<at::Tensor>();
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < targets_.size(); ++i) {
    const Target& target = targets_[i];
    if (target.delayed && late.empty()) {
      continue;  // a backward that names inputs delays none
    }
    if (target.delayed) {
      compare(target.what, late.at(*target.delayed), eager[i]);
    } else if (target.added) {
      const at::Tensor& before = target.grad_before;
      compare(target.what + " (added to what .grad held)", target.leaf.grad(),
              eager[i].defined() ? before.add(eager[i]) : before);
    } else {
      compare(target.what, target.result ? results.at(*target.result) : at::Tensor(), eager[i]);
    }
  }
  targets_.clear();
  ++counts_->backwards;
}

}  // namespace sidestream
