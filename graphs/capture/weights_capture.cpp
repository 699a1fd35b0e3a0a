// Captures of delayed weight gradients.
#include <utility>
#include <vector>

#include <c10/util/irange.h>
#include <torch/csrc/autograd/function.h>

#include "base/site.h"
#include "graphs/capture/node_naming.h"
#include "graphs/capture/sequence_capture.h"
#include "graphs/gradients/backward_split.h"
#include "graphs/gradients/call_gradients.h"
#include "graphs/guards/call_spec.h"
#include "graphs/outputs/storage_holders.h"
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
// M is the stream of k's backward. If another stream calls backward_dw, M waits for it before the fork, and it waits for M at the end.
//
// Offloaded storages that only the weights graph reads are reloaded for it, into its pool. The sizing pass finds these storages: it runs
// both parts, and notes what kernels of the first part read. What nodes unpack does not show it, because they also unpack tensors that they
// do not read. In the capture of the backward, nodes get such a tensor over a storage without memory.
// Let j be the weights graph before that of k. The targets of k get their memory when the capture of j begins. Only j and k's own weights
// graph leave that memory alone. The reload is queued before the launch of j, if k's weight gradients are due by then. If none are due
// when the backward of k comes, the reload is queued before that backward. Otherwise it is queued when k's weights graph is launched. Any
// other weights graph waits for it first, and k is reloaded once more. So does a forward if k's weight gradients were dropped: it may
// offload to the slots that the reload reads. The slots of k are given to no call whose forward comes before k's weights graph.
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

/// First of all in the capture of the weights graph of call `index`: allocates where its own reloads go, unless an earlier one has, and
/// those of the next call that has any. So these can be queued before this graph is launched.
void allocate_weights_targets(SequenceCapture& capture, std::size_t index) {
  const std::vector<std::size_t>& order = capture.order.by_weights();
  for (std::size_t rank = capture.order.weights_rank(index); rank < order.size(); ++rank) {
    CapturedCall& call = capture.sequence.calls[order[rank]];
    if (!call.forward.graph) {
      return;  // it is captured later
    }
    if (call.copies.captured.for_weights == 0) {
      continue;
    }
    if (!call.copies.weights_allocated) {
      if (order[rank] != index && capture.order.weights_index(index) <= call.copies.released_at) {
        return;  // it has its sources still
      }
      call.copies.weights_allocated = true;
      call.copies.weights_reload_at = capture.order.weights_rank(index);
      allocate_targets(capture, call.copies, /*for_weights=*/true);
    }
    if (order[rank] != index) {
      return;
    }
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
  split = BackwardSplit(torch::autograd::collect_next_edges(roots), std::move(first), std::move(parameters));
  std::vector<at::Tensor> made = split.run_first(seeds);
  for (const auto i : c10::irange(delayed.size())) {
    if (!split.in_second(i)) {
      require_dense_gradient(call.parameters[delayed[i]], made[order.size() - delayed.size() + i]);
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
    allocate_weights_targets(capture, index);
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
    await_end_of_backward(capture.runtime.device());
    check_captured(capture, index, Direction::weights);
  }
  CaptureOffload::release(call.copies.captured);
  for (const auto i : c10::irange(delayed.size())) {
    CallParameter& parameter = call.parameters[delayed[i]];
    if (split.in_second(i)) {
      require_dense_gradient(parameter, grads[i]);
      parameter.grad = grads[i];
    }
    parameter.grad = not_owning(parameter.grad);
  }
  split = {};
  capture.live[index].computed.clear();
}

}  // namespace sidestream
