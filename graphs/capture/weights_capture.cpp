// Captures of delayed weight gradients.
#include <optional>
#include <utility>
#include <vector>

#include <c10/util/irange.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "base/site.h"
#include "graphs/capture/node_naming.h"
#include "graphs/capture/sequence_capture.h"
#include "graphs/gradients/backward_split.h"
#include "graphs/guards/call_spec.h"
#include "memory/storage_view.h"
#include "offload/nested_backward.h"
#include "runtime/capture_guard.h"
#include "sidestream/error.h"

namespace sidestream {

// Note [Delayed weight gradients]
// A call with delayed parameters has three graphs: forward, backward, and weights.
//
// The backward computes the gradients of inputs. It stops where delayed parameters join, and keeps the gradients that arrive at these
// nodes. The weights graph runs from these nodes: it reads the kept gradients and what the nodes saved. See BackwardSplit.
//
// The sequence's order says before which graph each weights graph is captured (SequenceOrder::weights_index). If it does not, they are
// captured after all others. What a weights graph reads lives until then, and graphs from that index on may use the memory. So a weights
// graph may replay at any time after its backward, but before graphs from that index on, and before the next pass. What weights graphs
// allocate lies in a pool of their own, and they replay one after the other.
//
//   M  backward k: ... (waits for done(k)) -- other work -- backward_dw: fork --+-- (waits for done) -- copy gradients -- accumulate
//                                                                               |   ^
//   S                                                                           +--> weights graph of k
//
// Gradients that the backward computes although they are delayed stay in its memory until backward_dw.

namespace {

/// The parameters of `call` whose gradients are delayed, as indices.
std::vector<std::size_t> delayed_of(const CapturedCall& call) {
  std::vector<std::size_t> delayed;
  for (const auto i : c10::irange(call.parameters.size())) {
    if (call.parameters[i].policy == GradientPolicy::delayed) {
      delayed.push_back(i);
    }
  }
  return delayed;
}

void require_gradient(const at::Tensor& grad) {
  if (!grad.defined()) {
    throw CaptureError(
        "a parameter got a gradient in the sizing pass, but gets none in the capture; let the callable do the same "
        "work each time");
  }
}

}  // namespace

std::vector<at::Tensor> run_first_part(SequenceCapture& capture, std::size_t index,
                                       const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& targets,
                                       const std::vector<at::Tensor>& seeds) {
  const CapturedCall& call = capture.sequence.calls[index];
  BackwardSplit& split = capture.live[index].split;
  const std::size_t inputs = targets.size() - call.parameters.size();
  const std::vector<std::size_t> delayed = delayed_of(call);
  std::vector<std::size_t> order;  // of the targets: those of the first part, then delayed parameters
  for (const auto i : c10::irange(targets.size())) {
    if (i < inputs || call.parameters[i - inputs].policy != GradientPolicy::delayed) {
      order.push_back(i);
    }
  }
  std::vector<at::Tensor> first;
  for (const std::size_t target : order) {
    first.push_back(targets[target]);
  }
  std::vector<at::Tensor> parameters;
  for (const std::size_t i : delayed) {
    parameters.push_back(call.parameters[i].tensor);
    order.push_back(inputs + i);
  }
  torch::autograd::edge_list from;
  for (const at::Tensor& root : roots) {
    from.push_back(torch::autograd::impl::gradient_edge(root));
  }
  split = BackwardSplit(std::move(from), std::move(first), std::move(parameters));
  std::vector<at::Tensor> made = split.run_first(seeds);
  for (const auto i : c10::irange(delayed.size())) {
    if (!split.in_second(i)) {
      require_gradient(made[order.size() - delayed.size() + i]);
    }
  }
  std::vector<at::Tensor> grads(targets.size());
  for (const auto i : c10::irange(order.size())) {
    grads[order[i]] = std::move(made[i]);
  }
  return grads;
}

void capture_weights(SequenceCapture& capture, std::size_t index) {
  CapturedCall& call = capture.sequence.calls[index];
  BackwardSplit& split = capture.live[index].split;
  if (!call.delays || !call.has_backward) {
    return;
  }
  if (capture.sequence.weights_pool == nullptr) {
    capture.sequence.weights_pool = GraphMemory(GraphMemory::Use::own).pool(capture.resources.runtime);
    capture.weights_use.emplace(capture.runtime, *capture.sequence.weights_pool);
  }
  capture.use.comes_to(capture.order.weights_index(index));  // what is freed below was live after the graph before
  const std::vector<std::size_t> delayed = delayed_of(call);
  std::vector<at::Tensor> grads;
  if (split.has_second()) {
    const Site site(Activity::capture_weights, call.spec.scope->site);
    capture.weights_use->comes_to(capture.order.weights_rank(index));
    capture.weights_use->capture_begins();
    CaptureGuard guard(capture.runtime, capture.stream, *capture.sequence.weights_pool, call.spec.generators);
    {
      const RecorderGuard no_recorder(nullptr);
      const NestedBackwardRefusal no_nested;
      const CallStateGuard state(call.spec.state, Direction::backward);
      const OperatorObserverGuard observer = capture.reads.watch();
      NodeNaming naming(capture.runtime, capture.stream, call.weights.names, *call.spec.scope,
                        capture.live[index].scopes);
      const OperatorObserverGuard names = naming.watch();
      grads = split.run_second();
      names.rethrow();
      observer.rethrow();
    }
    hold_reads(capture.reads, call);
    capture.runtime.record(call.weights.done, capture.stream);
    capture.record_caller_event();
    call.weights.graph = guard.end();
    capture.weights_use->capture_ended();
    check_captured_weights(capture, index);
  }
  CaptureOffload::release(call.copies.captured);
  for (const auto i : c10::irange(delayed.size())) {
    CallParameter& parameter = call.parameters[delayed[i]];
    if (split.in_second(i)) {
      require_gradient(grads[i]);
      parameter.grad = grads[i];
    }
    parameter.grad = not_owning(parameter.grad);
  }
  split = {};
  capture.live[index].computed.clear();
}

}  // namespace sidestream
