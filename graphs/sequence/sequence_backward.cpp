// Replay of backwards. Note [Graph choreography] in graph_sequence.cpp has their order.
#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "base/site.h"
#include "graphs/gradients/call_gradients.h"
#include "graphs/sequence/graph_sequence.h"

namespace sidestream {
namespace {

/// One that a backward hands to autograd.
struct Gradient {
  const at::Tensor& made;             ///< static
  OutputSet outputs;                  ///< those that lead to it
  bool direct = false;                ///< handed on as it is
  OutputStorage* memory = nullptr;    ///< that is given out
  const StorageView* view = nullptr;  ///< of it

  [[nodiscard]] bool comes(OutputSet used) const { return made.defined() && (outputs & used) != 0; }
};

/// Of inputs, then of parameters: all but those that the graph adds into `.grad` itself.
template <class Visit>
void for_each_gradient(CapturedCall& call, const Visit& visit) {
  for (const std::size_t i : call.lists.inputs_with_gradient) {
    StaticInput& input = call.inputs[i];
    visit(Gradient{input.grad, input.outputs, input.grad_direct, input.goes_to_leaf ? &*input.memory : nullptr,
                   &input.view});
  }
  for (const std::size_t i : call.lists.parameters_with_gradient) {
    CallParameter& parameter = call.parameters[i];
    visit(Gradient{parameter.grad, parameter.outputs, false, parameter.memory ? &*parameter.memory : nullptr,
                   &parameter.view});
  }
}

/// Copies gradients to where the graph reads them. `join`: makes the current stream wait for the copies whose memory the graph may use.
template <class Join>
void write_static_grads(CapturedCall& call, const std::vector<at::Tensor>& grads, const Join& join) {
  const at::NoGradGuard no_grad;
  // A seed that is another call's input gradient is in the pool, in memory that copies of the latest graphs may still use. If that call's
  // backward did not run just before, no other wait orders this stream after them.
  bool joined = false;
  const auto join_before_write = [&](const StaticOutput& output) {
    if ((output.seed_from || output.seed_in_pool) && !joined) {
      join();
      joined = true;
    }
  };
  std::size_t given = 0;
  for (StaticOutput& output : call.outputs) {
    if (!output.requires_grad) {
      continue;
    }
    const at::Tensor& grad = grads[given++];
    if (!grad.defined()) {
      join_before_write(output);
      output.seed.zero_();
    } else if (grad.const_data_ptr() != output.seed.const_data_ptr() || grad.strides() != output.seed.strides()) {
      join_before_write(output);
      output.seed.copy_(grad, /*non_blocking=*/true);
    }
  }
}

}  // namespace

// Memory is allocated before the launch. If an allocation fails, nothing has happened yet, and the backward may be tried again.
void GraphSequence::backward(std::size_t index, std::uint64_t generation, std::vector<at::Tensor>& grads) {
  CapturedCall& call = captured_.calls[index];
  std::unique_lock lock(mutex_, std::defer_lock);
  const Drawing drawing = streams_.lock_to_launch(call.backward.graph, lock);
  const std::size_t graph_index = captured_.order.backward_index(index);
  captured_.check_backward(index, generation, captured_.memory->turn() == this);
  captured_.check_order_of_backward(index, pending_.runs(), pending_.weights());
  refuse_lost_weights(index);
  const bool all_in_place = !call.accumulates || are_in_place(call.lists.accumulated, runtime_->current_stream());
  if (!all_in_place) {
    check_owned_grads(call.spec.name, call.parameters);
  }
  OutputSet used = 0;
  std::uint64_t unused = 0;
  std::size_t given = 0;
  for (const auto i : c10::irange(call.outputs.size())) {
    if (call.outputs[i].requires_grad) {
      const bool has_gradient = grads[given++].defined();
      used |= has_gradient ? output_bit(i) : 0;
      unused += has_gradient ? 0 : 1;
    }
  }
  if (used == 0) {  // as in plain training, where no operator's backward makes something of nothing
    settle_pending(index);
    latest_backward_ = index;
    grads.clear();
    for_each_gradient(call, [&](const Gradient&) { grads.emplace_back(); });
    return;
  }
  const Site site(Activity::launch_backward, call.site);
  streams_.follow_latest_call();
  give_up_later_calls(graph_index);
  // Before the seeds are written: they may lie in the memory of outputs.
  outputs_.before_launch(graph_index);
  write_static_grads(call, grads, [&] { copies_.await_others(graph_index, runtime_->current_stream()); });
  grads.clear();
  for_each_gradient(call, [&](const Gradient& grad) {
    grads.push_back(!grad.comes(used) || grad.memory ? at::Tensor()
                    : grad.direct                    ? grad.made
                                                     : at::empty_like(grad.made));
  });
  if (call.accumulates && call.replay.grads_kept_for != runtime_->current_stream()) {
    keep_owned_grads_for(call.parameters, runtime_->current_stream());
    call.replay.grads_kept_for = runtime_->current_stream();
  }
  const Streams adding = all_in_place ? Streams() : streams_that_add(call.parameters, runtime_->current_stream());
  for (const c10::Stream stream : adding) {
    streams_.order(stream, runtime_->current_stream());
  }
  if (!all_in_place) {
    attach_owned_grads(call.parameters, used);
  }
  launch_backward(index, drawing);
  for (const c10::Stream stream : adding) {
    streams_.order(runtime_->current_stream(), stream);
  }
  delay_weights(index, used);
  settle_pending(index);
  latest_backward_ = index;
  unused_outputs_ += unused;
  if (call.owns_gradients) {
    outputs_.gave_gradients(index);
  }
  call.replay.backward_failed = true;  // until the gradients are out
  std::size_t next = 0;
  for_each_gradient(call, [&](const Gradient& grad) {
    at::Tensor& result = grads[next++];
    if (!grad.comes(used) || grad.direct) {
      return;
    }
    if (grad.memory != nullptr) {
      result = grad.view->restore(grad.memory->give(runtime_->current_stream()));
    } else {
      result.copy_(grad.made, /*non_blocking=*/true);
    }
  });
  call.replay.backward_failed = false;
}

// Each call's stream waits for that of the call before, so the latest one is enough.
void GraphSequence::let_caller_wait() {
  const std::lock_guard lock(mutex_);
  const int backward = torch::autograd::get_current_graph_task_id();
  if (backward == -1 || backward == backward_with_waiting_caller_) {  // -1: there is no caller but this thread
    return;
  }
  const auto wait = [self = shared_from_this()] {
    const std::lock_guard lock(self->mutex_);
    self->streams_.follow_latest_call();
  };
  torch::autograd::Engine::get_default_engine().queue_callback(wait);
  backward_with_waiting_caller_ = backward;
}

void GraphSequence::launch_backward(std::size_t index, const Drawing& drawing) {
  CapturedCall& call = captured_.calls[index];
  const c10::Stream side = streams_.side(call.replay.target, 0);
  streams_.fork(side);
  const StepTrace::InChunk in_chunk(copies_.trace(), call.replay.chunk);
  copies_.before_backward(index, side);
  StepTrace::Graph traced(copies_.trace(), SpanKind::backward, side);
  const std::uint64_t launches = streams_.launches();
  try {
    streams_.launch(call.backward.graph, side, call.backward.done, call.replay.target.event().get(), drawing);
    call.replay.backward_launched = true;
    traced.launched(this, captured_.order.backward_index(index));
    copies_.backward_launched(index);
    use_.launched(captured_.order.backward_index(index));
    traced.counted();
  } catch (...) {
    if (streams_.launches() != launches) {  // the launch itself went well
      call.replay.backward_launched = call.replay.backward_failed = true;
      copies_.backward_launched(index);
      settle_pending(index);
    }
    streams_.settle(side);
    throw;
  }
}

void GraphSequence::give_up_later_calls(std::size_t graph_index) noexcept {
  while (const auto later = pending_.runs().obstacle(graph_index)) {
    CapturedCall::Replay& replay = captured_.calls[*later].replay;
    replay.given_up = true;
    ++replay.generation;  // what it saved is overwritten from here on
    settle_pending(*later);
  }
}

void GraphSequence::settle_pending(std::size_t index) noexcept {
  pending_.end(index);
  settle_idle();
}

void GraphSequence::settle_idle() noexcept {
  if (!pending_.any_run()) {
    use_.idle(captured_.ungiven_bytes());
  }
}

void GraphSequence::drop_pending(std::size_t index, std::uint64_t generation) noexcept {
  const std::lock_guard lock(mutex_);
  if (captured_.calls[index].replay.generation != generation || !pending_.runs().contains(index)) {
    return;
  }
  settle_pending(index);
}

}  // namespace sidestream
