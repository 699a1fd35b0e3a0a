#include "graphs/sequence/replay_node.h"

#include <algorithm>
#include <typeinfo>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "graphs/sequence/graph_sequence.h"
#include "offload/autograd_walk.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// The node as one of a graphed call, or null.
const ReplayNode* as_replay(const torch::autograd::Node* node) noexcept {
  return node != nullptr && typeid(*node) == typeid(ReplayNode) ? static_cast<const ReplayNode*>(node) : nullptr;
}

/// True if others than `node` get to keep its gradient: hooks, or the caller of autograd::grad.
bool seen_by_others(torch::autograd::Node& node) {
  const auto keeps = [](const auto& hook) {
    return dynamic_cast<const ReplayNode::KeepsNoGradient*>(hook.get()) == nullptr;
  };
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

/// True if a gradient on this edge stays with one tensor, on the stream that made it: no other node gets it.
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

bool ReplayNode::connects(c10::ArrayRef<at::Tensor> tensors, const GraphSequence& sequence) {
  bool found = false;
  walk_autograd(makers_of(tensors), [&](const torch::autograd::Node& node) {
    const ReplayNode* const replay = as_replay(&node);
    found = found || (replay != nullptr && replay->sequence_.get() == &sequence &&
                      sequence.awaits_backward(replay->call_, replay->generation_));
    return !found;
  });
  return found;
}

torch::autograd::variable_list ReplayNode::apply(torch::autograd::variable_list&& grads) {
  if (at::GradMode::is_enabled()) {
    throw UsageError(
        sequence_->captured().describe(call_) +
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
  if (sequence_->captured().calls[call_].accumulates && !results.empty() && !leads_to_a_leaf(results)) {
    sequence_->let_caller_wait();
  }
  return results;
}

// Autograd lets the caller of a backward() wait for the streams of leaves, and a leaf's stream waits for the gradient that it gets. Any other
// node may drop what it gets.
bool ReplayNode::leads_to_a_leaf(const torch::autograd::variable_list& results) const {
  for (const auto i : c10::irange(results.size())) {
    const torch::autograd::Node* const next = next_edge(i).function.get();
    const ReplayNode* const replay = as_replay(next);  // one that accumulates lets the caller wait itself
    const bool waited_for = replay != nullptr
                                ? replay->sequence_->captured().calls[replay->call_].accumulates
                                : next != nullptr && typeid(*next) == typeid(torch::autograd::AccumulateGrad);
    if (waited_for && results[i].defined()) {
      return true;
    }
  }
  return false;
}

// A backward that names inputs (autograd::grad, or backward with a list) must not change any other `.grad`. A graph would, so such a
// backward is refused.
void ReplayNode::refuse_named_gradients() const {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (wanted != nullptr && !wanted->empty() && sequence_->captured().calls[call_].accumulates) {
    throw UsageError(
        sequence_->captured().describe(call_) +
        ": only gradients of some inputs are requested (autograd::grad, or backward with inputs), but its " +
        "backward graph adds into the .grad of its parameters; capture with another " +
        "GradientPolicy than accumulated for its parameters (GraphOptions::gradients)");
  }
}

bool ReplayNode::owns_gradient_of(const at::Tensor& leaf) const {
  const std::vector<CallParameter>& parameters = sequence_->captured().calls[call_].parameters;
  return std::any_of(parameters.begin(), parameters.end(), [&](const CallParameter& parameter) {
    return parameter.policy == GradientPolicy::accumulated && parameter.tensor.is_same(leaf);
  });
}

void ReplayNode::attach(std::shared_ptr<GraphSequence> sequence, std::size_t index, CapturedCall& call,
                        c10::Stream current, c10::ArrayRef<at::Tensor> inputs, detail::TensorBuffer& outputs) {
  auto node = std::make_shared<ReplayNode>(std::move(sequence), index, call.replay.generation);
  torch::autograd::edge_list edges;
  edges.reserve(call.lists.inputs_with_gradient.size() + call.lists.parameters_with_gradient.size());
  for (const std::size_t i : call.lists.inputs_with_gradient) {
    StaticInput& input = call.inputs[i];
    edges.push_back(torch::autograd::impl::gradient_edge(inputs[i]));
    const auto* from = as_replay(edges.back().function.get());
    input.grad_direct =
        input.grad_is_seed && from != nullptr && from->sequence_ == node->sequence_ && from->call_ == input.from->call;
    input.goes_to_leaf = input.memory && is_leaf_on(current, edges.back());
  }
  node->of_inputs_ = edges.size();
  for (const std::size_t i : call.lists.parameters_with_gradient) {
    edges.push_back(torch::autograd::impl::gradient_edge(call.parameters[i].tensor));
  }
  node->set_next_edges(std::move(edges));
  for (const auto i : c10::irange(outputs.size())) {
    if (call.outputs[i].requires_grad) {
      torch::autograd::set_history(outputs[i], node);
    }
  }
}

}  // namespace sidestream
