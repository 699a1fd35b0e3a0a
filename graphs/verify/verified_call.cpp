#include "graphs/verify/verified_call.h"

#include <algorithm>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include "graphs/capture/body_hooks.h"
#include "graphs/guards/call_spec.h"
#include "graphs/sequence/replay_node.h"
#include "offload/saved_tensor_recorder.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// Makes a tensor a non-leaf without changing it: autocast keeps the cast of a leaf, and a body may write into a non-leaf.
class PassOn final : public torch::autograd::Node {
 public:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override { return std::move(grads); }
  [[nodiscard]] std::string name() const override { return "SidestreamVerify"; }
};

at::Tensor no_leaf(const at::Tensor& leaf) {
  at::Tensor tensor = leaf.detach();
  auto node = std::make_shared<PassOn>();
  node->set_next_edges({torch::autograd::impl::gradient_edge(leaf)});
  torch::autograd::set_history(tensor, node);
  return tensor;
}

/// `input` with the strides of its static copy, as the graph reads it.
at::Tensor as_captured(const at::Tensor& input, const at::Tensor& held) {
  const at::Tensor detached = input.detach();
  if (!held.defined() || held.strides() == detached.strides()) {
    return detached;
  }
  const at::NoGradGuard no_grad;
  return at::empty_like(held).copy_(detached);
}

std::string index_name(const char* what, std::size_t index) { return what + std::to_string(index); }

}  // namespace

VerifiedCall::VerifiedCall(const VerifiedCall::Call& call, std::shared_ptr<VerifiedCall::Counts> counts)
    : name_(call.captured->spec.name),
      generators_(generators_of(call.captured->spec, call.device)),
      tolerance_(at::globalContext().deterministicAlgorithms() ? 0 : call.tolerance),
      delayed_(call.delayed),
      counts_(std::move(counts)) {}

void VerifiedCall::hold(Sandbox& sandbox) const {
  sandbox.keep_state(GeneratorState(at::detail::getDefaultCPUGenerator()));
  for (const at::Generator& generator : generators_) {
    sandbox.keep_state(GeneratorState(generator));
  }
  std::vector<at::Tensor> buffers;
  for (const Buffer& buffer : buffers_) {
    buffers.push_back(buffer.tensor);
  }
  sandbox.keep_buffers(buffers);
  sandbox.watch_writes();
}

VerifiedCall::~VerifiedCall() = default;

std::shared_ptr<VerifiedCall> VerifiedCall::run(const VerifiedCall::Call& call,
                                                std::shared_ptr<VerifiedCall::Counts> counts) {
  std::shared_ptr<VerifiedCall> verified(new VerifiedCall(call, std::move(counts)));
  verified->run_forward(call);
  return verified;
}

void VerifiedCall::run_forward(const VerifiedCall::Call& call) {
  for (const StaticOutput& output : call.captured->outputs) {
    begins_backward_.push_back(output.requires_grad);
  }
  detail::TensorBuffer given;
  add_parameters(call);
  add_buffers(call);
  const RecorderGuard no_recorder(nullptr);
  Sandbox sandbox;
  hold(sandbox);
  add_inputs(call, given);
  call.body(given.data(), outputs_);
  for (Target& target : targets_) {
    target.edge = torch::autograd::impl::gradient_edge(target.leaf);
    if (target.is_input) {  // see Note [Gradients through tensors that a body keeps]
      refuse_to_run(*target.edge.function, "graphed call \"" + name_ + "\"");
    }
  }
  const at::NoGradGuard no_grad;
  for (Buffer& buffer : buffers_) {
    buffer.eager = buffer.tensor.detach().clone();
  }
  sandbox.check();
}

void VerifiedCall::add_inputs(const VerifiedCall::Call& call, detail::TensorBuffer& given) {
  std::size_t results = 0;
  std::vector<Target> inputs;
  for (std::size_t i = 0; i < call.inputs.size(); ++i) {
    const at::Tensor& input = call.inputs[i];
    if (const auto& aliases = call.captured->spec.inputs[i].aliases; aliases && aliases->same_as != i) {
      const at::Tensor earlier = given[aliases->same_as];  // one leaf, as in its capture: it gets the whole gradient
      results += input.defined() && input.requires_grad() ? 1 : 0;
      given.push_back(earlier);
      continue;
    }
    if (!input.defined() || !input.requires_grad()) {
      given.push_back(input.defined() ? as_captured(input, call.captured->inputs[i].tensor) : input);
      continue;
    }
    const at::Tensor leaf = as_captured(input, call.captured->inputs[i].tensor).requires_grad_(true);
    given.push_back(input.is_leaf() ? leaf : no_leaf(leaf));
    Target& target = inputs.emplace_back();
    target.what = index_name("gradient of input ", i);
    target.leaf = leaf;
    target.is_input = true;
    target.result = results++;
  }
  for (Target& target : targets_) {
    if (target.result) {
      *target.result += results;
    }
  }
  targets_.insert(targets_.begin(), std::make_move_iterator(inputs.begin()), std::make_move_iterator(inputs.end()));
}

void VerifiedCall::add_parameters(const VerifiedCall::Call& call) {
  const auto known = [&](const at::Tensor& tensor) {
    return std::any_of(targets_.begin(), targets_.end(), [&](const Target& t) { return t.leaf.is_same(tensor); });
  };
  const auto add = [&](const at::Tensor& parameter, const std::string& otherwise) -> Target& {
    const auto named = call.names->find(parameter.unsafeGetTensorImpl());
    Target& target = targets_.emplace_back();
    target.what = "gradient of " + (named != call.names->end() ? named->second : otherwise);
    target.leaf = parameter;
    return target;
  };
  const std::vector<CallParameter>& parameters = call.captured->parameters;
  std::size_t results = 0;
  std::size_t delayed = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const bool added = parameters[i].policy == GradientPolicy::accumulated;
    const bool late = parameters[i].policy == GradientPolicy::delayed;
    if (!known(parameters[i].tensor)) {
      Target& target = add(parameters[i].tensor, index_name("parameter ", i));
      target.added = added;
      target.result = added || late ? std::nullopt : std::optional(results);
      target.delayed = late ? std::optional(delayed) : std::nullopt;
    }
    results += added || late ? 0 : 1;
    delayed += late ? 1 : 0;
  }
  if (call.captured->spec.module !=
      nullptr) {  // parameters that the capture did not use must get no gradient now, either
    for (const auto& item : call.captured->spec.module->named_parameters()) {
      if (item.value().is_leaf() && item.value().requires_grad() && !known(item.value())) {
        add(item.value(), item.key());
      }
    }
  }
}

void VerifiedCall::add_buffers(const VerifiedCall::Call& call) {
  if (call.captured->spec.module == nullptr) {
    return;
  }
  for (const auto& item : call.captured->spec.module->named_buffers()) {
    if (item.value().defined()) {
      const auto named = call.names->find(item.value().unsafeGetTensorImpl());
      buffers_.push_back({"buffer " + (named != call.names->end() ? named->second : item.key()), item.value(), {}});
    }
  }
}

void VerifiedCall::compare(const std::string& what, const at::Tensor& replayed, const at::Tensor& eager) const {
  const std::optional<std::string> differs = difference(replayed, eager, tolerance_);
  if (!differs) {
    return;
  }
  throw VerificationError(
      "graphed call \"" + name_ + "\": replayed, its " + what + " " + *differs +
      ". Either its capture froze a value that has changed since (a plain member, a host counter), or the call does "
      "not do the same work each time. Pass the value as an argument, keep it in a buffer, or leave the call out of "
      "the graphs. If its operators add in varying order, set Options::verify_tolerance. The eager run's changes to "
      "tensors and generators were undone; its changes to other members of the module were not");
}

void VerifiedCall::compare_forward(const detail::TensorBuffer& outputs) {
  const std::lock_guard lock(mutex_);
  if (outputs.size() != outputs_.size()) {
    throw VerificationError("graphed call \"" + name_ + "\": a replay returns " + std::to_string(outputs.size()) +
                            " tensors, an eager run " + std::to_string(outputs_.size()) +
                            "; it does not do the same work each time: leave it out of the graphs");
  }
  torch::autograd::Node* node = nullptr;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const std::string what = index_name("output ", i);
    if (outputs[i].defined() != outputs_[i].defined() ||
        (outputs[i].defined() && outputs[i].requires_grad() != outputs_[i].requires_grad())) {
      const auto say = [](const at::Tensor& tensor) {
        return !tensor.defined() ? "is undefined" : tensor.requires_grad() ? "requires a gradient" : "requires none";
      };
      throw VerificationError("graphed call \"" + name_ + "\": its " + what + " " + say(outputs[i]) +
                              " replayed, and " + say(outputs_[i]) +
                              " run eagerly; it does not do the same work each time: leave it out of the graphs");
    }
    compare(what, outputs[i], outputs_[i]);
    if (!begins_backward_[i]) {  // perhaps an input that the call returns: its gradient does not pass the replay
      outputs_[i].reset();
    } else if (dynamic_cast<ReplayNode*>(outputs[i].grad_fn().get()) != nullptr) {
      node = outputs[i].grad_fn().get();
    }
  }
  for (Buffer& buffer : buffers_) {
    compare(buffer.what, buffer.tensor, buffer.eager);
    buffer.eager.reset();
  }
  ++counts_->forwards;
  if (node == nullptr) {
    outputs_.clear();
    return;
  }
  await_backward(*node);
}

void VerifiedCall::drop() noexcept {
  detail::TensorBuffer outputs;  // freed after the lock is released
  std::vector<Target> targets;
  const std::lock_guard lock(mutex_);
  awaits_backward_ = false;
  std::swap(outputs, outputs_);
  std::swap(targets, targets_);
}

bool VerifiedCall::done() const noexcept {
  const std::lock_guard lock(mutex_);
  return !awaits_backward_;
}

}  // namespace sidestream
