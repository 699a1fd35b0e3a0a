// Gradients of delayed parameters: a graph after the backward. Note [Delayed weight gradients] in graphs/capture/weights_capture.cpp.
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/irange.h>

#include "base/site.h"
#include "graphs/gradients/backward_split.h"
#include "graphs/sequence/graph_sequence.h"

namespace sidestream {

std::vector<at::Tensor> GraphSequence::replay_weights(std::size_t index) {
  std::unique_lock lock(mutex_, std::defer_lock);
  const Drawing drawing = streams_.lock_to_launch(captured_.calls[index].weights.graph, lock);
  return launch_weights(index, drawing);
}

std::vector<at::Tensor> GraphSequence::launch_weights(std::size_t index, const Drawing& drawing) {
  CapturedCall& call = captured_.calls[index];
  captured_.check_weights(index);
  const Site site(Activity::launch_weights, call.site);
  streams_.follow_latest_call();
  std::vector<at::Tensor> grads;
  // Memory first: if there is none, nothing has happened yet.
  for (const std::size_t i : call.lists.delayed_parameters) {
    const CallParameter& parameter = call.parameters[i];
    grads.push_back((parameter.outputs & call.replay.used) != 0 ? at::empty_like(parameter.grad) : at::Tensor());
  }
  if (call.weights.graph) {
    const c10::Stream side = streams_.side(call.replay.target, 0);
    streams_.fork(side);
    const StepTrace::InChunk in_chunk(copies_.trace(), call.replay.chunk);
    copies_.before_weights(index, side);
    StepTrace::Span traced;
    traced.begin(copies_.trace(), SpanKind::weights, side);
    try {
      streams_.launch(call.weights.graph, side, call.weights.done, call.replay.target.event().get(), drawing);
      traced.end();
      weights_use_->launched(captured_.order.weights_rank(index));
    } catch (...) {
      streams_.settle(side);
      throw;
    }
  }
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < grads.size(); ++i) {
    if (grads[i].defined()) {
      grads[i].copy_(call.parameters[call.lists.delayed_parameters[i]].grad, /*non_blocking=*/true);
    }
  }
  weights_use_->idle(-copies_.for_weights_bytes());
  return grads;
}

void GraphSequence::run_where_delayed(std::size_t index, c10::function_ref<void()> work) {
  const c10::Stream caller = runtime_->current_stream();
  const c10::Stream stream = captured_.calls[index].replay.weights_delayed.value_or(caller);
  const auto order = [this](c10::Stream earlier, c10::Stream later) {
    const std::lock_guard lock(mutex_);
    streams_.order(earlier, later);
  };
  order(caller, stream);
  {
    const StreamGuard on_it(*runtime_, stream);
    work();
  }
  order(stream, caller);
}

LeafGradients GraphSequence::take_weights(std::size_t index) {
  LeafGradients made;
  std::unique_lock lock(mutex_, std::defer_lock);
  const Drawing drawing = streams_.lock_to_launch(captured_.calls[index].weights.graph, lock);
  made.grads = launch_weights(index, drawing);
  const CapturedCall& call = captured_.calls[index];
  for (const std::size_t i : c10::irange(made.grads.size())) {
    if (made.grads[i].defined()) {
      made.leaves.push_back(call.parameters[call.lists.delayed_parameters[i]].tensor);
    }
  }
  std::erase_if(made.grads, [](const at::Tensor& grad) { return !grad.defined(); });
  settle_weights(index);
  return made;
}

void GraphSequence::settle_weights(std::size_t index) noexcept {
  const std::lock_guard lock(mutex_);
  if (std::exchange(captured_.calls[index].replay.weights_delayed, std::nullopt)) {
    pending_.weights_computed(index);
    settle_idle();
  }
}

}  // namespace sidestream
