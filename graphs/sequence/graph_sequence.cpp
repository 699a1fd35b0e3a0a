#include "graphs/sequence/graph_sequence.h"

#include <exception>
#include <mutex>
#include <optional>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/util/irange.h>

#include "base/site.h"
#include "graphs/sequence/replay_node.h"
#include "offload/kept_memory.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// Copies inputs to where the graph reads them. `join`: makes the current stream wait for the copies whose memory the graph may use.
template <class Join>
void write_static_inputs(CapturedCall& call, c10::ArrayRef<at::Tensor> inputs, c10::Stream current, const Join& join) {
  bool joined = false;
  const at::NoGradGuard no_grad;
  for (const auto i : c10::irange(inputs.size())) {
    const StaticInput& input = call.inputs[i];
    if (!input.tensor.defined() || input.same_as_earlier ||
        (inputs[i].const_data_ptr() == input.tensor.const_data_ptr() && same_layout(inputs[i], input.tensor))) {
      continue;
    }
    if ((input.from || input.in_pool) && !joined) {  // memory of the pool, which copies may use by now
      join();
      joined = true;
    }
    input.tensor.copy_(inputs[i], /*non_blocking=*/true);
    if (inputs[i].device() == input.tensor.device()) {
      keep_for(inputs[i].storage(), current);
    }
  }
}

}  // namespace

// Note [Graph choreography]
// M is the caller's stream, S a side stream of the sequence. D and H are the engine's streams of copies to the host and to the device
// (GroupMover). n and k are calls of the sequence.
//
//   M  forward n: fork --+-- (waits for done) --+-- other calls -- backward n: fork --+-- (waits for done) --+--
//                        |                      ^ done(n)                             |                      ^ done(n)
//   S                    +--> graph of forward n                                      +--+--> graph of backward n
//                                | ready(n, group)                                       ^ reloaded(n)
//   D                            +--> copies to the host, offloaded(n)                   |
//   H                                             (before a graph from reload_at(n) on) copies to the device
//
//   forward n    M: (if the sequence's latest graph was called on another stream: wait for that stream; backward n likewise)
//                M: (copy out outputs that are still held, see Note [Outputs are ordinary tensors])
//                M: (if an input has another address: copy)  record fork
//                S: wait fork, wait for the copies that must be done before this graph, launch
//                D: for each group: wait ready(n, group), copy   then record offloaded(n)
//                M: wait done(n)
//                (delayed eager groups are offloaded between launch and M's wait, here and below: Note [Eager choreography])
//   backward n   M: (if a gradient has another address: copy)  record fork
//                S: wait fork, wait for the copies that must be done before this graph
//                H: (reloads that are due: n if it is not on the device, and calls below) wait for S, copy k, record reloaded(k)
//                S: wait reloaded(n), launch
//                M: wait done(n)
//
// Graphs run one after the other, on whichever side streams they are: each graph starts after M, and M goes on after the graph's done.
//
// Work that waits for a graph never waits for copies. A graph holds no copy over the link. It records ready when the tensors of a group
// are complete, and done after its last compute.
//
// No rule relies on the order of copies on D or H, because other sequences and eager groups queue their copies there as well.
//
// A graph may be launched if it lies between the forward and the backward of each pending call (PendingRuns). Then it overwrites nothing
// that these calls saved: all graphs share one pool of memory, which the captures used in their order. That order is data
// (SequenceOrder), and each graph has an index in it. From the backward of a call on until its weights graph, each graph must lie between
// the two: see Note [Delayed weight gradients].
//
// Memory that a copy reads or writes is used again only from a certain graph index on, and the first graph that is launched from there
// on waits for the copy. The capture knows that index, because it allocated from the pool in the order of the indices:
//  - released_at(k): the sources of k went back to the pool before the capture of the graph at this index. That graph, or the first
//    one launched after it, waits for offloaded(k). A graph at or before the forward of k begins another pass, and waits for it too.
//  - reload_at(k): the targets of k were allocated at the start of the capture of the graph at this index: of an earlier backward, or of
//    one of the last two forwards before backward k if no backward comes in between. They stay allocated until backward k, and nothing
//    else uses them in between. So the copies are queued before the launch of that forward, or of the first backward from there on,
//    after S, and so after all earlier uses of the memory. Backward k waits for reloaded(k). A graph at an index outside of these waits
//    for reloaded(k) as well, and k is reloaded once more if it is still needed.
//
// The next copy into a host slot starts after ready of a forward. That forward waited for reloaded, so the last reload from the slot is
// done. A host slot belongs to its call for the life of the call's graphs, and to like calls in the same order whose forwards are after
// its backward (former_runs): the forward of such a call is beyond the targets' indices, and waits for the reload too. In shared memory
// sequences take turns with the slots: see Note [Turns in shared memory].
//
// M may write a static input of a call's own after done(n) of both directions: it lies outside of the pool, and no copy touches it.
//
// M may write memory of the pool while no graph runs. First it waits for the copies that the next graph waits for, because that graph's
// capture may have taken their memory. M writes an input or a seed there, or a linked input whose output has been given other memory
// since.
//
// Before the first launch from a certain index on, an output that other calls read is copied out if it is still held, and M waits for the
// streams that read it. From that index on any graph may write the memory: the output went back to the pool before the capture of a graph
// whose index is above those of all graphs and copies that need it (OutputLiveness).

GraphSequence::GraphSequence(const GraphResources& resources, CapturedSequence captured)
    : runtime_(resources.runtime),
      streams_(runtime_, resources.eager, captured.options),
      captured_(std::move(captured)),
      mutex_(captured_.memory->mutex()),
      pending_(captured_.order, *captured_.memory),
      outputs_(runtime_, captured_.calls, captured_.order, captured_.released_outputs, streams_.mark()),
      copies_(runtime_, resources.mover, captured_.calls, captured_.order, pending_.runs(), pending_.weights()),
      use_(runtime_, *captured_.pool, captured_.pool_use, captured_.ungiven_bytes()),
      delayed_weights_(resources.delayed_weights) {
  if (captured_.weights_pool != nullptr) {
    weights_use_.emplace(runtime_, *captured_.weights_pool, captured_.weights_use, 0);
  }
  outputs_.counts().outputs += captured_.overwritten;
}

GraphSequence::~GraphSequence() {
  const std::lock_guard lock(mutex_);
  try {
    streams_.synchronize();
  } catch (const std::exception&) {  // the device has failed: nothing runs any more
  }
  release_memory();
}

bool GraphSequence::begins_pass(std::size_t call) const {
  const std::lock_guard lock(mutex_);
  return pending_.runs().empty() &&
         (!captured_.forwards_alone() || latest_ < 0 || static_cast<std::int64_t>(call) <= latest_);
}

bool GraphSequence::awaits_backward(std::size_t call, std::uint64_t generation) const {
  const std::lock_guard lock(mutex_);
  return pending_.runs().contains(call) && captured_.calls[call].replay.generation == generation;
}

void GraphSequence::forward(std::size_t index, c10::ArrayRef<at::Tensor> inputs, detail::TensorBuffer& outputs,
                            const ReplayOptions* target, Inputs known) {
  CapturedCall& call = captured_.calls[index];
  std::unique_lock lock(mutex_, std::defer_lock);
  const Drawing drawing = streams_.lock_to_launch(call.forward.graph, lock);
  if (known == Inputs::unknown || !call.forward.graph) {
    captured_.check(index, inputs);
  }
  if (pending_.runs().contains(index)) {
    captured_.check_turn(index, index, "forward");
    throw UsageError(captured_.describe(index) +
                     ": the backward of its previous forward is still pending, and this forward would " +
                     "overwrite what it needs; run that backward first, or capture once for each microbatch in flight");
  }
  const std::size_t graph_index = captured_.order.forward_index(index);
  await_failed_weights(graph_index, lock);
  if (const auto obstacle = pending_.weights().obstacle(graph_index)) {
    captured_.check_turn_of_weights(index, *obstacle, "forward");
    throw UsageError(
        captured_.describe(index) +
        ": weight gradients of calls that were captured with it are delayed, and this forward would overwrite "
        "what they are computed from; call backward_dw first, or capture once for each microbatch in flight");
  }
  if (const auto obstacle = pending_.runs().obstacle(graph_index)) {
    captured_.check_turn(index, *obstacle, "forward");
    throw UsageError(captured_.describe(index) + ": called after \"" + captured_.calls[*obstacle].spec.name +
                     "\", whose backward is pending; replay " +
                     "calls that were captured together in the order of their capture, or capture them separately");
  }
  check_views_of_inputs(call.spec.name, call.outputs, call.inputs, inputs);
  const Site site(Activity::launch_forward, call.site);
  take_turn(index);
  streams_.follow_latest_call();
  outputs_.before_launch(graph_index);
  latest_ = static_cast<std::int64_t>(index);
  latest_backward_.reset();
  ++call.replay.generation;  // from here on what an earlier forward saved may be overwritten
  call.replay.backward_launched = call.replay.backward_failed = call.replay.given_up = call.replay.ran_eagerly = false;
  const c10::Stream current = runtime_->current_stream();
  write_static_inputs(call, inputs, current, [&] { copies_.await_others(graph_index, current); });
  launch_forward(index, target, drawing);
  give_outputs(call.outputs, call.output_storages, call.inputs, inputs, current, outputs);
  if (call.has_backward) {
    for (BackwardRead& read : call.reads.in_backward) {
      read.at_forward = read.counter.current_version();
    }
    pending_.begin(index);
    ReplayNode::attach(shared_from_this(), index, call, current, inputs, outputs);
    call.stamp_versions(inputs, outputs);
  }
}

void GraphSequence::launch_forward(std::size_t index, const ReplayOptions* target, const Drawing& drawing) {
  CapturedCall& call = captured_.calls[index];
  call.replay.target = target != nullptr ? *target : ReplayOptions();
  const c10::Stream side = streams_.side(call.replay.target, index);
  streams_.fork(side);
  copies_.before_forward(index, side);
  StepTrace::Graph traced(copies_.trace(), SpanKind::forward, side);
  try {
    streams_.launch(call.forward.graph, side, call.forward.done, call.replay.target.event().get(), drawing);
    traced.launched(this, captured_.order.forward_index(index));
    copies_.forward_launched(index);
    use_.launched(captured_.order.forward_index(index));
    traced.counted();
  } catch (...) {
    streams_.settle(side);
    throw;
  }
}

void GraphSequence::join_copies() {
  const std::lock_guard lock(mutex_);
  copies_.join(runtime_->current_stream());
}

void GraphSequence::drop_graphs(std::size_t index) {
  streams_.synchronize();
  CapturedCall& call = captured_.calls[index];
  drop_pending(index, call.replay.generation);
  settle_weights(index);
  call.forward.graph.reset();
  call.backward.graph.reset();
  call.weights.graph.reset();
  copies_.reset(index);
  use_.dropped();
}

void GraphSequence::reset() {
  const std::lock_guard lock(mutex_);
  for (const auto i : c10::irange(captured_.calls.size())) {
    drop_graphs(i);
  }
  release_memory();
  // A capture that replaces these graphs starts from the calls' arguments outside of the pool: they stay.
  for (CapturedCall& call : captured_.calls) {
    for (StaticInput& input : call.inputs) {
      const bool linked = input.from && !captured_.calls[input.from->call].replay.released;
      input.tensor = linked ? at::Tensor()
                     : input.in_pool && input.tensor.defined()
                         ? at::empty_like(input.tensor, c10::TensorOptions().device(c10::kMeta))
                         : input.tensor;
      input.grad = at::Tensor();
    }
    for (StaticOutput& output : call.outputs) {
      output.tensor = output.seed = at::Tensor();
    }
    call.output_storages.clear();
    for (CallParameter& parameter : call.parameters) {
      parameter.grad = parameter.attached = at::Tensor();
    }
    call.for_each_given_gradient([](std::optional<OutputStorage>& memory) { memory.reset(); });
  }
  captured_.pool.reset();
  weights_use_.reset();
  captured_.weights_pool.reset();
  captured_.outside = {};
}

void GraphSequence::release(std::size_t index) {
  const std::lock_guard lock(mutex_);
  CapturedCall& call = captured_.calls[index];
  if (call.replay.released) {
    return;
  }
  drop_graphs(index);
  call.replay.released = true;
  outputs_.release(index);
  for (StaticInput& input : call.inputs) {
    input.tensor = input.grad = at::Tensor();
  }
  for (CallParameter& parameter : call.parameters) {
    parameter.grad = parameter.attached = at::Tensor();
  }
  call.for_each_given_gradient([](std::optional<OutputStorage>& memory) {
    if (memory && !memory->held()) {  // else it is copied out if a graph would overwrite it
      memory.reset();
    }
  });
  call.reads.externals.clear();
  call.reads.in_backward.clear();
  call.replay.target = {};
  if (captured_.released()) {
    reset();
  }
}

GraphSequence::Counts& GraphSequence::Counts::operator+=(const Counts& other) noexcept {
  replays += other.replays;
  unused_outputs += other.unused_outputs;
  outputs += other.outputs;
  gradients += other.gradients;
  return *this;
}

GraphSequence::Counts GraphSequence::take_counts() {
  const std::lock_guard lock(mutex_);
  const SequenceOutputs::Counts given = std::exchange(outputs_.counts(), {});
  return {streams_.take_launches(), std::exchange(unused_outputs_, 0), given.outputs, given.gradients};
}

}  // namespace sidestream
