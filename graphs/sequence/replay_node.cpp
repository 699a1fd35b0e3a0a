#include "graphs/sequence/replay_node.h"

#include <algorithm>
#include <typeinfo>

#include <ATen/core/grad_mode.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "graphs/sequence/graph_sequence.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// The node as one of a graphed call, or null.
const ReplayNode* as_replay(const torch::autograd::Node* node) noexcept {
  return node != nullptr && typeid(*node) == typeid(ReplayNode) ? static_cast<const ReplayNode*>(node) : nullptr;
}

/// True when others than `node` get to keep its gradient: hooks, or the caller of autograd::grad.
bool seen_by_others(torch::autograd::Node& node) {
  const auto keeps = [](const auto& hook) { return dynamic_cast<const KeepsNoGradient*>(hook.get()) == nullptr; };
  const auto& hooks = node.pre_hooks();
  if (!node.tensor_pre_hooks().empty() || std::any_of(hooks.begin(), hooks.end(), keeps)) {
    return true;
  }
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (wanted == nullptr || wanted->empty()) {
    return false;
  }
  const auto found = wanted->find(&node);
  return found != wanted->end() && found->second.captures_ != nullptr;
}

/// What it is given stays with one tensor, on the stream that gave it: no other node gets it.
bool is_leaf_on(c10::Stream stream, const torch::autograd::Edge& edge) noexcept {
  const torch::autograd::Node* const node = edge.function.get();
  return node != nullptr && typeid(*node) == typeid(torch::autograd::AccumulateGrad) &&
         node->input_metadata(edge.input_nr).stream() == stream;
}

}  // namespace

ReplayNode::~ReplayNode() {
  if (!applied_) {
    sequence_->drop_pending(call_, generation_);
  }
}

torch::autograd::variable_list ReplayNode::apply(torch::autograd::variable_list&& grads) {
  if (at::GradMode::is_enabled()) {
    throw UsageError(
        sequence_->describe(call_) +
        ": backward was run with create_graph, but autograd cannot differentiate the backward of a graphed call; " +
        "if you need gradients of gradients, run the call eagerly");
  }
  refuse_named_gradients();
  torch::autograd::variable_list results = std::move(grads);
  results.reserve(num_outputs());
  sequence_->backward(call_, generation_, results);
  applied_ = true;
  // Static gradients between two calls of a sequence: a later replay uses their memory again.
  for (const auto i : c10::irange(of_inputs_)) {
    torch::autograd::Node* next = next_edge(i).function.get();
    if (as_replay(next) != nullptr && results[i].defined() && seen_by_others(*next)) {
      results[i] = results[i].clone();
    }
  }
  return results;
}

// A backward that names inputs (autograd::grad, or backward with a list) leaves every other .grad as it is; a graph cannot.
void ReplayNode::refuse_named_gradients() const {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (wanted != nullptr && !wanted->empty() && sequence_->calls_[call_].accumulates) {
    throw UsageError(
        sequence_->describe(call_) +
        ": only gradients of some inputs are requested (autograd::grad, or backward with inputs), but its " +
        "backward graph adds into the .grad of its parameters; capture without " +
        "GraphOptions::accumulate_in_graph, or with another policy than accumulated for its parameters");
  }
}

bool ReplayNode::owns_gradient_of(const at::Tensor& leaf) const {
  const std::vector<CallParameter>& parameters = sequence_->calls_[call_].parameters;
  return std::any_of(parameters.begin(), parameters.end(), [&](const CallParameter& parameter) {
    return parameter.policy == GradientPolicy::accumulated && parameter.tensor.is_same(leaf);
  });
}

void GraphSequence::attach_node(std::size_t index, c10::ArrayRef<at::Tensor> inputs, detail::TensorBuffer& outputs) {
  CapturedCall& call = calls_[index];
  auto node = std::make_shared<ReplayNode>(shared_from_this(), index, call.generation);
  torch::autograd::edge_list edges;
  edges.reserve(call.inputs_with_gradient.size() + call.parameters_with_gradient.size());
  const c10::Stream current = runtime_->current_stream();
  for (const std::size_t i : call.inputs_with_gradient) {
    StaticInput& input = call.inputs[i];
    edges.push_back(torch::autograd::impl::gradient_edge(inputs[i]));
    const auto* from = as_replay(edges.back().function.get());
    input.grad_direct =
        input.grad_is_seed && from != nullptr && from->sequence_.get() == this && from->call_ == input.from->call;
    input.goes_to_leaf = input.memory && is_leaf_on(current, edges.back());
  }
  node->of_inputs_ = edges.size();
  for (const std::size_t i : call.parameters_with_gradient) {
    edges.push_back(torch::autograd::impl::gradient_edge(call.parameters[i].tensor));
  }
  node->set_next_edges(std::move(edges));
  for (const auto i : c10::irange(outputs.size())) {
    if (call.outputs[i].requires_grad) {
      torch::autograd::set_history(outputs[i], node);
    }
  }
}

bool GraphSequence::accepts(std::size_t index, c10::ArrayRef<at::Tensor> inputs) const {
  const CapturedCall& call = calls_[index];
  if (inputs.size() != call.inputs.size()) {
    return false;
  }
  AliasesInTurn all_aliases(inputs);
  for (const auto i : c10::irange(inputs.size())) {
    const StaticInput& held = call.inputs[i];
    const at::Tensor& given = inputs[i];
    if (given.defined() != held.tensor.defined()) {
      return false;
    }
    if (given.defined() && (given.sizes() != held.tensor.sizes() || given.dtype() != held.tensor.dtype() ||
                            given.device() != held.tensor.device() ||
                            (call.spec.state.modes.gradients && given.requires_grad() != held.requires_grad) ||
                            (is_linked(held) && !is_linked_output(held, given)))) {
      return false;
    }
    if (call.casts && held.requires_grad && has_shared_cast(given) != call.spec.inputs[i].shared_cast) {
      return false;
    }
    if (const auto& aliases = call.spec.inputs[i].aliases; aliases) {  // of a call all arguments have them, or none
      const InputAliases now = all_aliases.next();
      if (given.defined() && (!(now == *aliases) || (!held.from && given.is_non_overlapping_and_dense() &&
                                                     !same_layout(given, held.tensor)))) {
        return false;
      }
    }
  }
  return true;
}

void GraphSequence::check(std::size_t index, c10::ArrayRef<at::Tensor> inputs) const {
  if (!calls_[index].forward) {
    throw UsageError(describe(index) + ": replayed after reset; capture it again");
  }
  if (accepts(index, inputs)) {
    return;
  }
  const CapturedCall& call = calls_[index];
  if (inputs.size() != call.inputs.size()) {
    throw UsageError(describe(index) + ": captured with " + std::to_string(call.inputs.size()) + " tensors, given " +
                     std::to_string(inputs.size()));
  }
  for (const auto i : c10::irange(inputs.size())) {
    const StaticInput& held = call.inputs[i];
    const at::Tensor& given = inputs[i];
    const std::string where = describe(index) + ": input " + std::to_string(i) + " ";
    if (given.defined() != held.tensor.defined()) {
      throw UsageError(where + (given.defined() ? "is a tensor but was undefined" : "is undefined but was a tensor") +
                       " at capture; pass the same arguments as captured");
    }
    if (!given.defined()) {
      continue;
    }
    const auto differs = [&](const std::string& what, const auto& now, const auto& then) {
      throw UsageError(where + "has " + what + " " + c10::str(now) + ", captured with " + c10::str(then) +
                       "; pass what was captured, or capture again");
    };
    if (given.sizes() != held.tensor.sizes()) {
      differs("shape", given.sizes(), held.tensor.sizes());
    }
    if (given.dtype() != held.tensor.dtype()) {
      differs("dtype", given.scalar_type(), held.tensor.scalar_type());
    }
    if (given.device() != held.tensor.device()) {
      differs("device", given.device(), held.tensor.device());
    }
    if (call.spec.state.modes.gradients && given.requires_grad() != held.requires_grad) {
      differs("requires_grad", given.requires_grad(), held.requires_grad);
    }
    if (calls_[index].casts && held.requires_grad && has_shared_cast(given) != call.spec.inputs[i].shared_cast) {
      throw UsageError(
          where +
          (has_shared_cast(given) ? "is a leaf, but was captured with a tensor that is not a leaf"
                                  : "is not a leaf, but was captured with a leaf") +
          "; autocast casts them differently. Capture with a sample of the same kind: x.view_as(x) is not a leaf");
    }
    if (is_linked(held) && !is_linked_output(held, given)) {
      throw UsageError(where +
                       "was captured as the output of an earlier call and shares its memory; pass exactly that " +
                       "output, or capture with a sample tensor of its own");
    }
    if (call.spec.inputs[i].aliases) {
      const InputAliases now = InputAliases::of(inputs, i);
      if (!(now == *call.spec.inputs[i].aliases)) {
        throw UsageError(where + "shares its memory with another argument, or did so at the capture; pass the same " +
                         "arguments as captured, or set CallOptions::on_new_arguments to capture");
      }
      if (given.is_non_overlapping_and_dense() && !same_layout(given, held.tensor)) {
        differs("strides", given.strides(), held.tensor.strides());
      }
    }
  }
}

}  // namespace sidestream
