#include "graphs/capture/eager_pass.h"

#include <algorithm>
#include <iterator>

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones_like.h>
#include <c10/util/ArrayRef.h>
#include <torch/csrc/autograd/autograd.h>

#include "graphs/capture/body_hooks.h"
#include "graphs/gradients/gradient_leaves.h"
#include "graphs/guards/call_spec.h"
#include "graphs/sandbox/sandbox.h"
#include "observe/operator_observer.h"
#include "offload/nested_backward.h"
#include "offload/saved_tensor_recorder.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

std::vector<bool> flags_of(const std::vector<at::Tensor>& tensors) {
  std::vector<bool> flags;
  for (const at::Tensor& tensor : tensors) {
    flags.push_back(tensor.defined() && tensor.requires_grad());
  }
  return flags;
}

}  // namespace

void PassHooks::before_forward() const {
  if (hooks_ != nullptr) {
    run(hooks_->before_forward());
  }
}

void PassHooks::after_forward() const {
  if (hooks_ != nullptr) {
    run(hooks_->after_forward());
  }
}

void PassHooks::before_backward() const {
  if (hooks_ != nullptr) {
    run(hooks_->before_backward());
  }
}

void PassHooks::after_backward() const {
  if (hooks_ != nullptr) {
    run(hooks_->after_backward());
  }
}

void PassHooks::run(const std::function<void()>& hook) const {
  if (!hook) {
    return;
  }
  const auto meet = [this](c10::ArrayRef<at::Tensor> tensors) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.defined() && tensor.has_storage()) {
        met_.insert(tensor.storage());
      }
    }
  };
  const RecorderGuard no_recorder(nullptr);
  const OperatorObserverGuard observer([&](const OperatorAccess& access) {
    meet(access.reads);
    meet(access.outputs);
  });
  hook();
  observer.rethrow();
}

detail::TensorBuffer eager_pass(const CallSpec& spec, const std::vector<at::Tensor>& inputs,
                                const std::function<std::vector<at::Tensor>()>& wanted, const PassHooks& hooks,
                                std::vector<bool>* used, PassClock* clock) {
  const std::vector<at::Tensor> known = wanted();
  Sandbox sandbox;
  sandbox.hide_gradients(known);
  sandbox.hide_hooks_and_accumulators(known);
  const NestedBackwardRefusal no_nested;
  detail::TensorBuffer outputs;
  hooks.before_forward();
  if (clock != nullptr) {
    clock->forward_begins();
  }
  {
    const CallStateGuard state(spec.state, Direction::forward);
    const std::vector<at::Tensor> arguments = arguments_of(spec, inputs);
    const std::vector<bool> flags = flags_of(arguments);
    spec.body(arguments.data(), outputs);
    if (flags_of(arguments) != flags) {
      throw CaptureError("callable \"" + spec.name + "\": it sets requires_grad of one of its inputs; a replay would " +
                         "not do that. Set it before the call, or on input.detach()");
    }
    refuse_hooks_of_body(spec.name, arguments, outputs);
  }
  if (clock != nullptr) {
    clock->forward_ended();
  }
  hooks.after_forward();
  std::vector<at::Tensor> roots;
  std::vector<at::Tensor> seeds;
  for (const at::Tensor& output : outputs) {
    if (output.defined() && output.requires_grad()) {
      roots.push_back(output);
      seeds.push_back(at::ones_like(output));
    }
  }
  const std::vector<at::Tensor> targets = wanted();
  std::vector<at::Tensor> grads(targets.size());
  if (!roots.empty()) {
    hooks.before_backward();
  }
  if (clock != nullptr) {
    clock->backward_begins();
  }
  if (!roots.empty() && !targets.empty()) {
    std::vector<at::Tensor> found;
    std::copy_if(targets.begin(), targets.end(), std::back_inserter(found),
                 [&](const at::Tensor& t) { return !holds(known, t); });
    sandbox.hide_hooks(found);  // the backward finds these leaves by the accumulators that the forward made
    const CallStateGuard state(spec.state, Direction::backward);
    grads = torch::autograd::grad(roots, targets, seeds, /*retain_graph=*/false, /*create_graph=*/false,
                                  /*allow_unused=*/true);
  }
  if (clock != nullptr) {
    clock->ended();
  }
  if (!roots.empty()) {
    hooks.after_backward();
  }
  for (const at::Tensor& leaf : known) {
    if (leaf.grad().defined()) {
      throw CaptureError("callable \"" + spec.name +
                         "\": its backward adds into .grad (is there a checkpoint that calls " +
                         "backward() inside backward?); a capture would add twice. Use autograd::grad there, or run "
                         "the callable outside " +
                         "of graphs");
    }
  }
  if (used != nullptr) {
    used->clear();
    for (const at::Tensor& grad : grads) {
      used->push_back(grad.defined());
    }
  }
  return outputs;
}

}  // namespace sidestream
