// The part of WholeStepBody that handles gradients: their memory, their initial values, and `.grad` after the step.
#include <algorithm>
#include <string>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/autograd.h>

#include "graphs/gradients/call_gradients.h"
#include "graphs/gradients/gradient_leaves.h"
#include "graphs/guards/input_facts.h"
#include "graphs/whole_step/whole_step_body.h"
#include "offload/autograd_walk.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// The leaves whose `.grad` a backward from `loss` would add to.
std::vector<at::Tensor> leaves_of(const at::Tensor& loss) {
  std::vector<at::Tensor> leaves;
  walk_autograd(makers_of(loss), [&](const torch::autograd::Node& node) {
    if (const at::Tensor* const leaf = leaf_of(&node); leaf != nullptr) {
      leaves.push_back(*leaf);
    }
  });
  return leaves;
}

/// Throws: UsageError if the gradient cannot be initialised with `.grad`.
void refuse_foreign(const std::string& name, const WholeStepBody::Target& target) {
  const at::Tensor& grad = target.parameter.grad();
  if (grad.defined() && !is_part_of(grad, target.gradient.memory) &&
      !held_by_parameter_alone(grad, target.gradient.attached, target.gradient.memory)) {
    throw UsageError("graphed step \"" + name +
                     "\": the .grad of a parameter is not the tensor that its graph adds into, and other code holds a "
                     "reference to it; set .grad to none, or to a clone of it");
  }
}

/// Initialises the gradient memory with `.grad`, or with zeros: the step adds to it.
void begin_with_grad(const WholeStepBody::Target& target) {
  const at::Tensor& grad = target.parameter.grad();
  if (!grad.defined()) {
    target.gradient.memory.zero_();
  } else if (!is_part_of(grad, target.gradient.memory)) {
    take_values(target.gradient.memory, grad);
  }
}

}  // namespace

std::size_t WholeStepBody::target_of(const at::Tensor& leaf) {
  const auto known = std::find_if(targets_.begin(), targets_.end(),
                                  [&](const Target& target) { return target.parameter.is_same(leaf); });
  if (known != targets_.end()) {
    return static_cast<std::size_t>(known - targets_.begin());
  }
  if (resources_.runtime->capture_status(resources_.runtime->current_stream()) != CaptureStatus::none) {
    throw CaptureError("graphed step \"" + given_->name +
                       "\": its loss depends on a leaf that it did not depend on in the warm-up; let the step do the "
                       "same work each time, and keep no leaf that it makes, nor a result with its history");
  }
  if (leaf.device() != resources_.runtime->device()) {
    throw UsageError("graphed step \"" + given_->name + "\": a parameter lies on " + leaf.device().str() +
                     ", but its graph runs on " + resources_.runtime->device().str() + "; move the parameter there");
  }
  if (hidden_) {
    hidden_->hide_gradients({leaf});
    targets_.push_back({leaf, resources_.owned_gradients.of(leaf)});
    return targets_.size() - 1;
  }
  const Target made = [&] {
    Sandbox hidden;
    hidden.hide_gradients({leaf});  // the caller's `.grad` is not changed
    return Target{leaf, resources_.owned_gradients.of(leaf)};
  }();
  if (given_->accumulate) {  // an eager run met it first, after prepare()
    refuse_foreign(given_->name, made);
    begin_with_grad(made);
  }
  targets_.push_back(made);
  return targets_.size() - 1;
}

void WholeStepBody::add_gradient(const at::Tensor& leaf, const at::Tensor& grad) {
  const at::NoGradGuard no_grad;
  const std::size_t target = target_of(leaf);
  if (met_.size() <= target) {
    met_.resize(target + 1, false);
  }
  // The step's function may have computed it on a stream of its own.
  if (grad.has_storage()) {  // a sparse one has none
    grad.record_stream(resources_.runtime->current_stream());
  }
  if (met_[target] || given_->accumulate) {
    targets_[target].gradient.memory.add_(grad);
  } else {
    if (is_sparse_or_nested(grad)) {
      throw UsageError("graphed step \"" + given_->name + "\": a parameter of shape " + c10::str(leaf.sizes()) +
                       " gets a sparse gradient, but a graph gives out dense ones only; let the module make dense "
                       "gradients (torch::nn::EmbeddingOptions::sparse), or train without a graphed step");
    }
    targets_[target].gradient.memory.copy_(grad);
  }
  met_[target] = true;
}

std::vector<WholeStepBody::NewGradient> WholeStepBody::add_gradients(const at::Tensor& loss) {
  const std::vector<at::Tensor> leaves = leaves_of(loss);
  std::vector<at::Tensor> grads = torch::autograd::grad({loss}, leaves, {}, /*retain_graph=*/false,
                                                        /*create_graph=*/false, /*allow_unused=*/true);
  std::vector<NewGradient> others;
  for (const auto i : c10::irange(leaves.size())) {
    at::Tensor grad = std::move(grads[i]);
    if (!grad.defined()) {
      continue;
    }
    const auto is_it = [&](const Target& target) { return target.parameter.is_same(leaves[i]); };
    if (std::any_of(targets_.begin(), targets_.end(), is_it)) {
      add_gradient(leaves[i], grad);
    } else {
      others.push_back({WeakLeaf(leaves[i].getIntrusivePtr()), std::move(grad)});
    }
  }
  return others;
}

void WholeStepBody::refuse_hooks() const {
  for (const at::Tensor& leaf : leaves_) {
    if (leaf.requires_grad() && has_gradient_hooks(leaf)) {
      throw UsageError("graphed step \"" + given_->name + "\": a parameter of shape " + c10::str(leaf.sizes()) +
                       " has gradient hooks, which its graph would not run; do their work in the step's update, or "
                       "train without a graphed step");
    }
  }
}

void WholeStepBody::learn_updated(const std::vector<at::Tensor>& parameters) {
  updated_outside_.clear();
  const std::vector<at::Tensor> known = known_leaves();
  for (const at::Tensor& parameter : parameters) {
    if (!holds(known, parameter) && !holds(updated_outside_, parameter)) {
      updated_outside_.push_back(parameter);
    }
  }
  refuse_frozen_gradients();
}

void WholeStepBody::refuse_frozen_gradients() const {
  for (const at::Tensor& parameter : updated_outside_) {
    const bool begins_with_none =
        !given_->accumulate && holds(leaves_, parameter);  // an eager run has met it since then
    if (parameter.grad().defined() && !begins_with_none) {
      throw UsageError(
          "graphed step \"" + given_->name + "\": its update uses a parameter of shape " + c10::str(parameter.sizes()) +
          " that is not in its module and that its loss does not depend on. A graph would freeze that parameter's "
          "gradient; clear the gradient, leave the parameter out of the update, or update it eagerly after the step");
    }
  }
}

void WholeStepBody::prepare() {
  refuse_hooks();
  refuse_frozen_gradients();
  if (!given_->accumulate) {
    return;
  }
  for (const Target& target : targets_) {
    refuse_foreign(given_->name, target);
  }
  for (const at::Tensor& leaf : leaves_without_in_graph_) {
    if (given_->update && leaf.grad().defined()) {
      throw UsageError("graphed step \"" + given_->name +
                       "\": a parameter that its loss does not depend on has a gradient, but the captured update would "
                       "skip that parameter. Clear the gradient, or update eagerly after the step");
    }
  }
  const at::NoGradGuard no_grad;
  for (const Target& target : targets_) {
    begin_with_grad(target);
  }
}

void WholeStepBody::attach_gradients(bool ran_eagerly) {
  const std::vector<bool>& met = ran_eagerly ? met_ : met_in_graph_;
  if (!given_->accumulate) {
    const std::vector<at::Tensor>& without = ran_eagerly ? leaves_ : leaves_without_in_graph_;
    for (const at::Tensor& leaf : without) {
      leaf.mutable_grad() = at::Tensor();
    }
  }
  for (std::size_t i = 0; i < met.size(); ++i) {
    if (met[i]) {
      at::Tensor& grad = targets_[i].parameter.mutable_grad();
      if (const at::Tensor& made = to_attach(targets_[i].gradient); !grad.is_same(made)) {
        grad = made;
      }
    }
  }
  if (given_->update) {  // their values changed: an eager forward may have saved the old ones
    for (const at::Tensor& leaf : leaves_) {
      if (leaf.requires_grad()) {
        leaf.unsafeGetTensorImpl()->bump_version();
      }
    }
  }
}

}  // namespace sidestream
