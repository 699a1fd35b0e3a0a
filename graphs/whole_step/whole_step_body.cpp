#include "graphs/whole_step/whole_step_body.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/irange.h>
#include <torch/nn/module.h>

#include "graphs/gradients/gradient_leaves.h"
#include "graphs/sandbox/sandbox.h"
#include "graphs/whole_step/whole_step_watch.h"
#include "offload/nested_backward.h"
#include "offload/saved_tensor_recorder.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

bool captures(const Runtime& runtime) {
  return runtime.capture_status(runtime.current_stream()) != CaptureStatus::none;
}

/// True if a graph's warm-up or capture runs on this thread.
bool for_a_graph(const Runtime& runtime) { return NestedBackwardRefusal::holds_here() || captures(runtime); }

/// In a warm-up, after the step function has run. Throws: CaptureError.
void refuse_backward_of_its_own(const std::string& name, const std::vector<at::Tensor>& leaves) {
  if (!NestedBackwardRefusal::holds_here()) {
    return;
  }
  for (const at::Tensor& leaf : leaves) {
    if (leaf.grad().defined()) {  // a warm-up pass begins without gradients
      throw CaptureError("graphed step \"" + name +
                         "\": its function calls backward(), which adds into gradients that the graph cannot own. "
                         "Return the loss; the engine computes its gradients");
    }
  }
}

at::Tensor checked_loss(const std::string& name, const Tensors& outputs) {
  if (outputs.empty() || !outputs.front().defined() || outputs.front().numel() != 1) {
    throw UsageError("graphed step \"" + name +
                     "\": its function returns no loss; return the loss, a tensor of one element, as the first tensor");
  }
  if (outputs.front().grad_fn() == nullptr) {
    throw UsageError(
        "graphed step \"" + name +
        "\": its loss depends on no parameter; compute it with gradients, and call no backward in the step function");
  }
  return outputs.front();
}

}  // namespace

/// For its lifetime `.grad` is what plain training would have before the update.
class WholeStepBody::AttachedForUpdate {
 public:
  AttachedForUpdate(const std::vector<Target>& targets, const std::vector<at::Tensor>& others,
                    const std::vector<bool>& met, bool accumulate) {
    for (const auto i : c10::irange(targets.size())) {
      if (met[i] || !accumulate) {
        attach(targets[i].parameter, met[i] ? to_attach(targets[i].gradient) : at::Tensor());
      }
    }
    for (const at::Tensor& other : others) {
      const auto is_it = [&](const Given& known) { return known.parameter.is_same(other); };
      if (!accumulate && std::none_of(given_.begin(), given_.end(), is_it)) {
        attach(other, at::Tensor());
      }
    }
  }
  /// True if the update did not replace, resize or clear a gradient.
  [[nodiscard]] bool unchanged() const {
    return std::all_of(given_.begin(), given_.end(), [](const Given& given) {
      const at::Tensor& now = given.parameter.grad();
      return given.grad.defined() ? now.is_same(given.grad) && now.const_data_ptr() == given.address : !now.defined();
    });
  }

 private:
  struct Given {
    at::Tensor parameter;
    at::Tensor grad;
    const void* address;
  };
  void attach(const at::Tensor& parameter, const at::Tensor& grad) {
    before_.hide_gradients({parameter});
    given_.push_back({parameter, grad, grad.defined() ? grad.const_data_ptr() : nullptr});
    parameter.mutable_grad() = grad;
  }

  Sandbox before_;
  std::vector<Given> given_;
};

WholeStepBody::WholeStepBody(EngineResources& resources, std::shared_ptr<const Given> given,
                             std::vector<std::size_t> counts)
    : resources_(resources), given_(std::move(given)), counts_(std::move(counts)), watch_(given_->name) {
  leaves_ = known_leaves();
  if (given_->offload && !resources_.options.offload_patterns().empty()) {
    offload_ = std::make_shared<WholeStepOffload>(
        WholeStepOffload::Parts{resources_.runtime, resources_.arena, &resources_.tree, &resources_.exclusions,
                                resources_.eager->limits(), resources_.capture_offload});
    std::erase_if(resources_.whole_step_offloads, [](const auto& weak) { return weak.expired(); });
    resources_.whole_step_offloads.push_back(offload_);
  }
}

WholeStepBody::Saving WholeStepBody::saving() const {
  if (!for_a_graph(*resources_.runtime)) {
    return Saving::eager;
  }
  if (offload_ == nullptr) {
    return Saving::nowhere;
  }
  return captures(*resources_.runtime) ? Saving::in_capture : Saving::counted;
}

std::vector<at::Tensor> WholeStepBody::known_leaves() const {
  std::vector<at::Tensor> leaves = given_->module->parameters();  // frozen ones too: an update may read their `.grad`
  for (const Target& target : targets_) {
    if (!holds(leaves, target.parameter)) {
      leaves.push_back(target.parameter);
    }
  }
  return leaves;
}

Tensors WholeStepBody::run(const Tensors& inputs) {
  const Runtime& runtime = *resources_.runtime;
  const bool for_graph = for_a_graph(runtime);
  std::optional<OperatorObserverGuard> observer;
  const auto shown = c10::make_scope_exit([this] { hidden_.reset(); });
  if (for_graph) {
    hidden_.emplace().hide_gradients(known_leaves());
    watch_.begin_pass(known_leaves(), captures(runtime));
    observer.emplace([this](const OperatorAccess& access) { watch_.after(access); },
                     [this](const OperatorAccess& access) { watch_.before(access); },
                     OperatorObserverGuard::Outer::hears_too);
  }
  Tensors outputs;
  met_.assign(targets_.size(), false);
  try {
    run_microbatches(inputs, outputs);
    if (given_->update) {
      const AttachedForUpdate attached(targets_, known_leaves(), met_, given_->accumulate);
      const UpdatedParameters updated;
      watch_.update_begins(known_leaves());
      given_->update();
      if (for_graph) {
        learn_updated(updated.parameters());
      }
      if (!attached.unchanged()) {
        throw UsageError("graphed step \"" + given_->name +
                         "\": its update cleared or replaced the .grad of a parameter, which no replay would do. Clear "
                         "gradients after the step (without StepOptions::accumulate each call begins with none), or "
                         "zero them in place: zero_grad(/*set_to_none=*/false)");
      }
    }
  } catch (...) {
    if (observer) {
      observer->rethrow();  // an error that names the operator says more than the one that follows from it
    }
    throw;
  }
  if (observer) {
    observer->rethrow();
  }
  if (for_graph) {
    met_.resize(targets_.size());
    if (captures(runtime)) {
      drop_replaced();
    }
    met_in_graph_ = met_;
    output_counts_in_graph_ = output_counts_;
  }
  leaves_ = known_leaves();
  leaves_without_in_graph_ = leaves_;
  std::erase_if(leaves_without_in_graph_, [this](const at::Tensor& leaf) {
    const auto of_leaf = [&](std::size_t i) { return met_in_graph_[i] && targets_[i].parameter.is_same(leaf); };
    const auto targets = c10::irange(met_in_graph_.size());
    return std::any_of(targets.begin(), targets.end(), of_leaf);
  });
  return outputs;
}

void WholeStepBody::abandon_capture() noexcept {
  if (offload_ != nullptr) {
    offload_->abandon();
  }
}

void WholeStepBody::drop_replaced() {
  const std::vector<at::Tensor> registered = given_->module->parameters();
  std::size_t kept = 0;
  for (const auto i : c10::irange(targets_.size())) {
    if (met_[i] || holds(registered, targets_[i].parameter)) {
      if (kept != i) {
        targets_[kept] = std::move(targets_[i]);
      }
      met_[kept++] = met_[i];
    }
  }
  targets_.resize(kept);
  met_.resize(kept);
}

void WholeStepBody::run_microbatches(const Tensors& inputs, Tensors& outputs) {
  Sandbox sandbox;
  sandbox.hide_hooks_and_accumulators(known_leaves());
  const Saving saving = this->saving();
  SavedTensorRecorder* recorder = nullptr;
  if (saving == Saving::counted) {
    offload_->begin_sizing();
  } else if (saving == Saving::in_capture) {
    recorder = &offload_->begin_capture();
  }
  output_counts_.clear();
  auto next = inputs.begin();
  for (const std::size_t count : counts_) {
    const auto end = next + static_cast<std::ptrdiff_t>(count);
    if (saving == Saving::eager) {
      run_microbatch(Tensors(next, end), outputs);
    } else {
      const RecorderGuard recording(saving == Saving::counted ? &offload_->next_sizing() : recorder);
      run_microbatch(Tensors(next, end), outputs);
    }
    next = end;
  }
  if (saving == Saving::counted) {
    offload_->end_sizing();
  } else if (saving == Saving::in_capture) {
    offload_->end_capture();
  }
}

void WholeStepBody::run_microbatch(const Tensors& inputs, Tensors& outputs) {
  Tensors made = given_->function(inputs);
  refuse_backward_of_its_own(given_->name, known_leaves());
  const std::vector<NewGradient> others = add_gradients(checked_loss(given_->name, made));
  output_counts_.push_back(made.size());
  for (const at::Tensor& tensor : made) {
    outputs.push_back(tensor.defined() ? tensor.detach() : tensor);
  }
  made.clear();
  // A leaf that the function made for itself, as a gradient penalty does, is gone with autograd's graph. All others become targets, or are
  // refused in a capture.
  for (const NewGradient& other : others) {
    if (const at::Tensor leaf(other.leaf.lock()); leaf.defined()) {
      add_gradient(leaf, other.grad);
    }
  }
}

}  // namespace sidestream
