// Replay of backwards; their order stands in Note [Graph choreography] in chain.cpp.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/irange.h>

#include "base/site.h"
#include "graphs/replay/chain.h"
#include "graphs/replay/owned_gradients.h"
#include "graphs/replay/version_check.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// Calls `visit(static gradient, outputs that lead there, it is handed on as it is)` for each gradient of a backward: of inputs,
/// then of parameters.
template <class Visit>
void for_each_gradient(const Layer& layer, bool of_parameters, const Visit& visit) {
  for (const StaticInput& input : layer.inputs) {
    if (input.requires_grad) {
      visit(input.grad, input.outputs, input.grad_direct);
    }
  }
  if (of_parameters) {
    for (const LayerParameter& parameter : layer.parameters) {
      visit(parameter.grad, parameter.outputs, false);
    }
  }
}

}  // namespace

void Chain::check_backward(std::size_t index, std::uint64_t generation) const {
  const Layer& layer = layers_[index];
  if (!layer.backward) {
    throw UsageError(describe(index) + ": it was reset before this backward; run the backward first");
  }
  if (layer.generation != generation) {
    throw UsageError(describe(index) +
                     ": this backward belongs to an earlier forward, whose saved tensors a later one has " +
                     "overwritten; run each backward before the next forward of the same capture");
  }
  if (layer.backward_failed && options_.accumulate_in_graph()) {
    throw UsageError(describe(index) + ": its backward failed after its graph had begun to add into .grad; " +
                     "set the gradients to none and run its forward again");
  }
  if (layer.backward_launched && !options_.retain_graph_in_backward()) {
    throw UsageError(describe(index) + ": a second backward" +
                     (layer.backward_failed ? ", after one that failed behind the launch of its graph" : "") +
                     ", but its saved tensors were not kept; capture with GraphOptions::retain_graph_in_backward");
  }
  if (top_ > static_cast<std::int64_t>(index)) {
    throw UsageError(
        describe(index) + ": its backward runs before that of \"" + layers_[top_].spec.name + "\", which was " +
        "called after it; calls captured together run their backwards in reverse order, or are captured apart");
  }
  check_backward_state(index);
  check_versions(layer);
  if (options_.accumulate_in_graph()) {
    check_owned_grads(layer);
  }
}

// What takes memory comes before the launch: where there is none, nothing has happened yet, and the backward may be tried again.
void Chain::backward(std::size_t index, std::uint64_t generation, std::vector<at::Tensor>& grads) {
  const std::lock_guard lock(mutex_);
  check_backward(index, generation);
  Layer& layer = layers_[index];
  const bool of_parameters = !options_.accumulate_in_graph();
  OutputSet used = 0;
  std::uint64_t unused = 0;
  std::size_t given = 0;
  for (const auto i : c10::irange(layer.outputs.size())) {
    if (layer.outputs[i].requires_grad) {
      const bool has_gradient = grads[given++].defined();
      used |= has_gradient ? output_bit(i) : 0;
      unused += has_gradient ? 0 : 1;
    }
  }
  if (used == 0) {  // as in plain training, where no operator's backward makes something of nothing
    settle_pending(index);
    grads.clear();
    for_each_gradient(layer, of_parameters, [&](const auto&, OutputSet, bool) { grads.emplace_back(); });
    return;
  }
  const Site site(Activity::launch_backward, layer.site);
  overwrite_released_outputs(copies_.place_of_backward(index));  // before the seeds, which may lie in their memory
  write_static_grads(layer, grads);
  grads.clear();
  for_each_gradient(layer, of_parameters, [&](const at::Tensor& grad, OutputSet from, bool direct) {
    grads.push_back(!grad.defined() || (from & used) == 0 ? at::Tensor() : direct ? grad : at::empty_like(grad));
  });
  if (options_.accumulate_in_graph()) {
    attach_owned_grads(layer, used);
  }
  launch_backward(index);
  settle_pending(index);
  counts_.unused_outputs += unused;
  layer.backward_failed = true;  // until the gradients are out
  std::size_t next = 0;
  for_each_gradient(layer, of_parameters, [&](const at::Tensor& grad, OutputSet /*from*/, bool direct) {
    at::Tensor& result = grads[next++];
    if (result.defined() && !direct) {
      result.copy_(grad, /*non_blocking=*/true);
    }
  });
  layer.backward_failed = false;
}

void Chain::launch_backward(std::size_t index) {
  Layer& layer = layers_[index];
  const c10::Stream side = backward_stream();
  runtime_->record(fork_, runtime_->current_stream());
  runtime_->wait(side, fork_);
  copies_.before_backward(index, side);
  const std::uint64_t replays = counts_.replays;
  try {
    launch(layer.backward, side, layer.backward_done);
  } catch (...) {
    if (counts_.replays != replays) {  // the launch itself went well
      layer.backward_launched = layer.backward_failed = true;
      copies_.backward_launched(index);
      settle_pending(index);
    }
    settle(side);
    throw;
  }
  layer.backward_launched = true;
  copies_.backward_launched(index);
  use_.launched(copies_.place_of_backward(index));
}

void Chain::settle_pending(std::size_t index) noexcept {
  layers_[index].pending = false;
  top_ = -1;
  for (std::size_t i = layers_.size(); i-- > 0;) {
    if (layers_[i].pending) {
      top_ = static_cast<std::int64_t>(i);
      return;
    }
  }
  use_.idle();
}

void Chain::settle(c10::Stream side) noexcept {
  try {
    runtime_->synchronize(side);
  } catch (const std::exception&) {  // the device has failed: nothing runs any more
  }
}

void Chain::write_static_grads(Layer& layer, const std::vector<at::Tensor>& grads) {
  const at::NoGradGuard no_grad;
  // A seed that is another layer's input gradient lies in the pool, in memory that copies of the latest graphs may still
  // use: where that layer's backward did not run just before, nothing else makes this stream wait for them.
  bool joined = false;
  const auto join_before_write = [&](const StaticOutput& output) {
    if (output.seed_from && !joined) {
      join_copies();
      joined = true;
    }
  };
  std::size_t given = 0;
  for (StaticOutput& output : layer.outputs) {
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

void Chain::drop_pending(std::size_t index, std::uint64_t generation) noexcept {
  const std::lock_guard lock(mutex_);
  if (index >= layers_.size() || layers_[index].generation != generation || !layers_[index].pending) {
    return;
  }
  settle_pending(index);
}

}  // namespace sidestream
