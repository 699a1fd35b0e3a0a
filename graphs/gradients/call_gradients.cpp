#include "graphs/gradients/call_gradients.h"

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/StringUtil.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include "graphs/guards/input_facts.h"
#include "graphs/outputs/storage_holders.h"
#include "memory/storage_view.h"
#include "offload/kept_memory.h"
#include "offload/name_pattern.h"
#include "offload/saved_tensor_recorder.h"
#include "runtime/replayed_memory.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// Where hooks are removed, LibTorch keeps their empty places.
bool has_tensor_hooks(const torch::autograd::AutogradMeta& meta) {
  const auto is_empty = [](const auto& function) { return function == nullptr; };
  const bool only_places = meta.hooks_.size() == 1 && meta.cpp_hooks_list_ != nullptr &&
                           std::all_of(meta.cpp_hooks_list_->begin(), meta.cpp_hooks_list_->end(), is_empty);
  return !meta.hooks_.empty() && !only_places;
}

/// As has_gradient_hooks, is_owned and streams_that_add say, for a `.grad` with memory; false is no answer yet.
bool is_in_place(const AccumulatedGradient& gradient, c10::Stream stream) {
  const auto* const meta = static_cast<const torch::autograd::AutogradMeta*>(gradient.parameter->autograd_meta());
  if (meta == nullptr || !meta->requires_grad_ || !meta->hooks_.empty() || meta->post_acc_grad_hooks_ != nullptr ||
      !meta->grad_.has_storage() || meta->grad_.const_data_ptr() != gradient.memory ||
      meta->grad_.strides() != gradient.parameter->strides()) {
    return false;
  }
  const auto accumulator = meta->grad_accumulator_.lock();
  return accumulator == nullptr || (accumulator->post_hooks().empty() && accumulator->pre_hooks().empty() &&
                                    accumulator->input_metadata(0).stream() == stream);
}

bool is_owned(const CallParameter& parameter, const at::Tensor& grad) { return is_part_of(grad, parameter.grad); }

/// True if `grad` has all of its storage and no other tensor can use a part of it. False for a seed that is handed on, for the one
/// gradient of a sum's two terms, and for an expanded number. A product's gradient is a transposed view, and only the view has its base.
/// Call after await_end_of_backward: autograd's thread has references until then.
bool has_own_memory(const at::Tensor& grad) {
  if (others_hold(grad, 1) || !grad.has_storage()) {
    return false;
  }
  const bool is_view = grad.is_view() && same_storage(grad._base(), grad);
  return !(is_view && others_hold(grad._base(), 1)) && !others_hold(grad.storage(), is_view ? 2 : 1) &&
         grad.is_non_overlapping_and_dense() && grad.nbytes() == grad.storage().nbytes();
}

/// Autograd gives a leaf's hooks the sum of what reached it, on the stream that it would accumulate on.
class Adder final : public torch::autograd::FunctionPreHook {
 public:
  Adder(at::Tensor target, char& added) : target_(std::move(target)), added_(&added) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    if (!grads[0].defined()) {
      return grads;
    }
    const at::NoGradGuard no_grad;
    target_.add_(grads[0]);
    *added_ = 1;
    return {at::Tensor()};
  }

 private:
  at::Tensor target_;
  char* added_;
};

/// A rule for each pattern of a list.
std::vector<GradientRule> single_rules(const std::vector<GradientRule>& lists) {
  std::vector<GradientRule> rules;
  for (const GradientRule& list : lists) {
    NamePatterns patterns = NamePatterns::parse(list.pattern);
    if (patterns.empty()) {  // a rule that names nothing is a mistake
      patterns = NamePatterns(std::vector<std::string>{list.pattern});
    }
    for (const std::string& pattern : patterns.patterns()) {
      rules.push_back({pattern, list.policy});
    }
  }
  return rules;
}

using ParameterNames = std::unordered_multimap<const c10::TensorImpl*, std::string>;  // one parameter may have several

ParameterNames parameter_names(const torch::nn::Module* model, const std::vector<CallSpec>& specs) {
  ParameterNames of_model;
  if (model != nullptr) {
    for (const auto& item : model->named_parameters()) {
      of_model.emplace(item.value().unsafeGetTensorImpl(), item.key());
    }
  }
  ParameterNames names = of_model;
  for (const CallSpec& spec : specs) {
    if (spec.module == nullptr) {
      continue;
    }
    for (const auto& item : spec.module->named_parameters()) {
      if (of_model.count(item.value().unsafeGetTensorImpl()) == 0) {
        names.emplace(item.value().unsafeGetTensorImpl(), spec.name + "." + item.key());
      }
    }
  }
  return names;
}

void check_pattern(const std::string& pattern, const ParameterNames& names, const std::vector<CallSpec>& specs) {
  const auto fits = [&](const std::string& name) { return name_matches(pattern, name); };
  if (std::none_of(names.begin(), names.end(), [&](const auto& item) { return fits(item.second); }) &&
      std::none_of(specs.begin(), specs.end(), [&](const CallSpec& spec) { return fits(spec.name); })) {
    throw UsageError("GraphOptions::gradients: the pattern \"" + pattern +
                     "\" matches no parameter of the model or of the captured calls; use dotted names of parameters, "
                     "such as blocks.*.weight");
  }
}

}  // namespace

bool held_by_parameter_alone(const at::Tensor& grad, const at::Tensor& attached, const at::Tensor& memory) {
  // If another graph has given it out, that graph may hold it too. It copies the gradient out before it writes the memory.
  const auto held_once = [&](const c10::Storage& storage) {
    return !others_hold(storage, 1) || (ReplayedMemory::of(storage.data_ptr()) != nullptr && !others_hold(storage, 2));
  };
  return (grad.is_same(attached) || !others_hold(grad, 1)) && grad.has_storage() && held_once(grad.storage()) &&
         grad.sizes() == memory.sizes() && grad.scalar_type() == memory.scalar_type() &&
         grad.device() == memory.device() && !grad.requires_grad();
}

void require_gradient(const CallParameter& parameter, bool has_gradient) {
  if (!has_gradient) {
    throw CaptureError("a parameter of shape " + c10::str(parameter.tensor.sizes()) +
                       " got a gradient in the sizing pass, but gets none in the capture; let the callable do the same "
                       "work each time");
  }
}

void require_dense_gradient(const CallParameter& parameter, const at::Tensor& grad) {
  require_gradient(parameter, grad.defined());
  if (is_sparse_or_nested(grad)) {
    throw CaptureError("a parameter of shape " + c10::str(parameter.tensor.sizes()) +
                       " gets a sparse gradient, but a graph gives out dense ones only; let the module make dense "
                       "gradients (torch::nn::EmbeddingOptions::sparse), or run the call eagerly");
  }
}

bool is_part_of(const at::Tensor& grad, const at::Tensor& memory) {
  return grad.const_data_ptr() == memory.const_data_ptr() && grad.strides() == memory.strides();
}

void take_values(const at::Tensor& memory, const at::Tensor& grad) {
  memory.copy_(grad);
  grad.record_stream(c10::impl::getDeviceGuardImpl(grad.device().type())->getStream(grad.device()));
}

const at::Tensor& in_graphs_memory(const at::Tensor& attached, const at::Tensor& memory) {
  if (!is_part_of(attached, memory)) {
    attached.set_data(memory);
  }
  return attached;
}

OwnedGradient OwnedGradients::of(const at::Tensor& parameter) {
  std::erase_if(entries_, [](const auto& entry) { return entry.second.memory.expired(); });
  if (const auto known = entries_.find(parameter.unsafeGetTensorImpl()); known != entries_.end()) {
    const OwnedGradient gradient{at::Tensor(known->second.attached.lock()), at::Tensor(known->second.memory.lock())};
    if (gradient.memory.sizes() == parameter.sizes() && gradient.memory.scalar_type() == parameter.scalar_type() &&
        gradient.memory.device() == parameter.device()) {
      if (!is_part_of(gradient.attached, gradient.memory)) {
        throw UsageError("a capture adds into the .grad of a parameter of shape " + c10::str(parameter.sizes()) +
                         " that other graphs add into, but that .grad was given other memory since (set_data). Set "
                         ".grad to none, and run a backward of those graphs before the capture");
      }
      return gradient;
    }
    entries_.erase(known);
  }
  const at::Tensor& given = parameter.grad();
  // Only the graph that gave a gradient out may write it; its values are copied when a backward begins.
  const bool taken = given.defined() && given.has_storage() && given.scalar_type() == parameter.scalar_type() &&
                     given.device() == parameter.device() && ReplayedMemory::of(given.storage().data_ptr()) == nullptr;
  OwnedGradient gradient{taken ? given : at::zeros_like(parameter.detach()), {}};
  gradient.memory = gradient.attached.detach();
  entries_.emplace(parameter.unsafeGetTensorImpl(),
                   Entry{WeakTensor(parameter.getIntrusivePtr()), WeakTensor(gradient.attached.getIntrusivePtr()),
                         WeakTensor(gradient.memory.getIntrusivePtr()), nullptr});
  return gradient;
}

void OwnedGradients::follow_latest_step(Runtime& runtime) {
  const c10::Stream now = runtime.current_stream();
  if (step_on_ && *step_on_ != now) {
    if (!mark_) {
      mark_ = runtime.create_event();
    }
    runtime.record(*mark_, *step_on_);
    runtime.wait(now, *mark_);
  }
  step_on_ = now;
}

void OwnedGradients::hold_accumulators() {
  for (auto& [key, entry] : entries_) {
    if (auto parameter = entry.parameter.lock(); parameter && !entry.memory.expired()) {
      entry.accumulator = torch::autograd::impl::grad_accumulator(at::Tensor(std::move(parameter)));
    }
  }
}

void OwnedGradients::release_accumulators() noexcept {
  for (auto& [key, entry] : entries_) {
    entry.accumulator.reset();
  }
}

void OwnedGradients::renew_accumulators() {
  release_accumulators();
  hold_accumulators();
}

bool has_gradient_hooks(const at::Tensor& parameter) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(parameter);
  if (meta == nullptr) {
    return false;
  }
  if (meta->post_acc_grad_hooks_ != nullptr || has_tensor_hooks(*meta)) {
    return true;
  }
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  return accumulator != nullptr && (!accumulator->post_hooks().empty() || !accumulator->pre_hooks().empty());
}

bool are_in_place(const std::vector<AccumulatedGradient>& gradients, c10::Stream stream) {
  constexpr std::size_t kAhead = 4;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (i + kAhead < gradients.size()) {
      __builtin_prefetch(gradients[i + kAhead].attached);
    }
    if (!is_in_place(gradients[i], stream)) {
      return false;
    }
  }
  return true;
}

void check_owned_grads(const std::string& name, const std::vector<CallParameter>& parameters) {
  for (const CallParameter& parameter : parameters) {
    if (parameter.policy != GradientPolicy::accumulated) {
      continue;
    }
    if (!parameter.tensor.requires_grad()) {
      throw UsageError(
          "graphed call \"" + name + "\": a parameter of shape " + c10::str(parameter.tensor.sizes()) +
          " was frozen between the call's forward and its backward. In plain training it would get no "
          "gradient, but the backward graph adds into its .grad. Freeze it before the forward or after the "
          "backward, or capture with another GradientPolicy than accumulated for this parameter "
          "(GraphOptions::gradients)");
    }
    if (has_gradient_hooks(parameter.tensor)) {
      throw UsageError("graphed call \"" + name + "\": a parameter of shape " + c10::str(parameter.tensor.sizes()) +
                       " got gradient hooks after the capture, but a backward graph that adds into .grad would not run "
                       "them; capture with another GradientPolicy than accumulated for this parameter "
                       "(GraphOptions::gradients)");
    }
    const at::Tensor& grad = parameter.tensor.grad();
    if (grad.defined() && !is_owned(parameter, grad) &&
        !held_by_parameter_alone(grad, parameter.attached, parameter.grad)) {
      throw UsageError(
          "graphed call \"" + name + "\": the .grad of a parameter of shape " + c10::str(parameter.tensor.sizes()) +
          " was replaced by another tensor, or given other memory, but its backward graph adds into the "
          ".grad that it owns. Set .grad to none or zero it in place, or capture with another GradientPolicy than "
          "accumulated for this parameter (GraphOptions::gradients)");
    }
  }
}

void attach_owned_grads(std::vector<CallParameter>& parameters, OutputSet used) {
  const at::NoGradGuard no_grad;
  for (CallParameter& parameter : parameters) {
    if (parameter.policy != GradientPolicy::accumulated) {
      continue;
    }
    const at::Tensor& grad = parameter.tensor.grad();
    if (grad.defined() ? is_owned(parameter, grad) : (parameter.outputs & used) == 0) {
      continue;
    }
    if (grad.defined()) {
      take_values(parameter.grad, grad);
    } else {
      parameter.grad.zero_();
    }
    parameter.tensor.mutable_grad() = in_graphs_memory(parameter.attached, parameter.grad);
  }
}

void keep_owned_grads_for(const std::vector<CallParameter>& parameters, c10::Stream stream) {
  for (const CallParameter& parameter : parameters) {
    if (parameter.policy == GradientPolicy::accumulated) {
      keep_for(parameter.grad.storage(), stream);
    }
  }
}

Streams streams_that_add(const std::vector<CallParameter>& parameters, c10::Stream current) {
  Streams streams;
  for (const CallParameter& parameter : parameters) {
    if (parameter.policy != GradientPolicy::accumulated) {
      continue;
    }
    if (const auto node = torch::autograd::impl::try_get_grad_accumulator(parameter.tensor); node != nullptr) {
      if (const c10::Stream stream = node->input_metadata(0).stream(); stream != current) {
        add_stream(streams, stream);
      }
    }
  }
  return streams;
}

void give_memory(CallParameter& parameter) {
  if (!StorageView::supported(parameter.grad)) {
    return;  // is cloned
  }
  if (!has_own_memory(parameter.grad)) {
    const at::NoGradGuard no_grad;
    parameter.grad = parameter.grad.clone();
  }
  parameter.memory.emplace(parameter.grad.storage());
  parameter.view = StorageView::capture(parameter.grad);
}

bool give_input_gradients(std::vector<StaticInput>& inputs, const std::vector<at::Tensor>& grads) {
  const auto first = std::find_if(grads.begin(), grads.end(), [](const at::Tensor& grad) { return grad.defined(); });
  if (first == grads.end()) {
    return false;
  }
  bool any = false;
  const RecorderGuard no_recorder(nullptr);
  await_end_of_backward(first->device());
  for (const auto i : c10::irange(grads.size())) {
    StaticInput& input = inputs[i];
    if (StorageView::supported(grads[i]) && has_own_memory(grads[i])) {
      input.memory.emplace(grads[i].storage());
      input.view = StorageView::capture(grads[i]);
      any = true;
    }
  }
  return any;
}

AddedGradients::AddedGradients(std::vector<at::Tensor> leaves, const std::vector<at::Tensor>& targets)
    : leaves_(std::move(leaves)), added_(leaves_.size()) {
  for (const auto i : c10::irange(leaves_.size())) {
    torch::autograd::impl::add_hook(leaves_[i], std::make_unique<Adder>(targets[i], added_[i]));
  }
}

AddedGradients::~AddedGradients() {
  for (const at::Tensor& leaf : leaves_) {
    torch::autograd::impl::clear_hooks(leaf);
  }
}

bool delays_gradients(const GraphOptions& options) {
  return std::any_of(options.gradients().begin(), options.gradients().end(),
                     [](const GradientRule& rule) { return rule.policy == GradientPolicy::delayed; });
}

PolicyOf gradient_policies(const GraphOptions& options, const torch::nn::Module* model,
                           const std::vector<CallSpec>& specs) {
  const std::vector<GradientRule> rules = single_rules(options.gradients());
  const ParameterNames all = rules.empty() ? ParameterNames() : parameter_names(model, specs);
  for (const GradientRule& rule : rules) {
    check_pattern(rule.pattern, all, specs);
  }
  return [rules, all](const CallSpec& spec, const at::Tensor& parameter) {
    const auto [first, last] = all.equal_range(parameter.unsafeGetTensorImpl());
    for (auto rule = rules.rbegin(); rule != rules.rend(); ++rule) {
      const auto fits = [&](const std::string& name) { return name_matches(rule->pattern, name); };
      if (first == last ? fits(spec.name)
                        : std::any_of(first, last, [&](const auto& item) { return fits(item.second); })) {
        return rule->policy;
      }
    }
    return GradientPolicy::cloned;
  };
}

}  // namespace sidestream
