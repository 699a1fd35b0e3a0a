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
void for_each_gradient(Layer& layer, const Visit& visit) {
  for (const std::size_t i : layer.inputs_with_gradient) {
    StaticInput& input = layer.inputs[i];
    visit(Gradient{input.grad, input.outputs, input.grad_direct, input.goes_to_leaf ? &*input.memory : nullptr,
                   &input.view});
  }
  for (const std::size_t i : layer.parameters_with_gradient) {
    LayerParameter& parameter = layer.parameters[i];
    visit(Gradient{parameter.grad, parameter.outputs, false, parameter.memory ? &*parameter.memory : nullptr,
                   &parameter.view});
  }
}

}  // namespace

void Chain::check_backward(std::size_t index, std::uint64_t generation) {
  Layer& layer = layers_[index];
  if (!layer.backward) {
    throw UsageError(describe(index) + ": it was reset before this backward; run the backward first");
  }
  if (memory_->turn() != this) {
    throw UsageError(describe(index) +
                     ": another capture in the same memory was replayed since its forward, and has overwritten its " +
                     "saved tensors; run its backward before that replay, or capture it in a pool of its own");
  }
  if (layer.generation != generation) {
    throw UsageError(describe(index) +
                     ": this backward belongs to an earlier forward, whose saved tensors a later one has " +
                     "overwritten; run each backward before the next forward of the same capture");
  }
  if (layer.backward_failed && layer.accumulates) {
    throw UsageError(describe(index) + ": its backward failed after its graph had begun to add into .grad; " +
                     "set the gradients to none and run its forward again");
  }
  if (layer.backward_launched && !options_.retain_graph_in_backward()) {
    throw UsageError(describe(index) + ": its backward is run a second time" +
                     (layer.backward_failed ? ", after one that failed after the launch of its graph" : "") +
                     ", but its saved tensors were not kept; capture with GraphOptions::retain_graph_in_backward");
  }
  if (top_ > static_cast<std::int64_t>(index)) {
    throw UsageError(
        describe(index) + ": its backward runs before that of \"" + layers_[top_].spec.name + "\", which was " +
        "called after it; run the backwards of calls that were captured together in reverse order, or capture the "
        "calls separately");
  }
  check_backward_state(index);
  check_versions(layer);
  if (layer.accumulates) {
    layer.grads_in_place = are_in_place(layer.accumulated);
    if (!layer.grads_in_place) {
      check_owned_grads(layer);
    }
  }
}

// What takes memory comes before the launch: where there is none, nothing has happened yet, and the backward may be tried again.
void Chain::backward(std::size_t index, std::uint64_t generation, std::vector<at::Tensor>& grads) {
  const std::lock_guard lock(mutex_);
  check_backward(index, generation);
  Layer& layer = layers_[index];
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
    for_each_gradient(layer, [&](const Gradient&) { grads.emplace_back(); });
    return;
  }
  const Site site(Activity::launch_backward, layer.site);
  follow_latest_call();
  const std::size_t place = copies_.place_of_backward(index);
  overwrite_released_outputs(place);  // before the seeds, which may lie in their memory
  overwrite_given_gradients(place);
  write_static_grads(layer, grads);
  grads.clear();
  for_each_gradient(layer, [&](const Gradient& grad) {
    grads.push_back(!grad.comes(used) || grad.memory ? at::Tensor()
                    : grad.direct                    ? grad.made
                                                     : at::empty_like(grad.made));
  });
  if (layer.accumulates && !layer.grads_in_place) {
    attach_owned_grads(layer, used);
  }
  launch_backward(index);
  settle_pending(index);
  counts_.unused_outputs += unused;
  if (layer.owns_gradients) {
    gave_gradients_.push_back(index);
  }
  layer.backward_failed = true;  // until the gradients are out
  std::size_t next = 0;
  for_each_gradient(layer, [&](const Gradient& grad) {
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
  layer.backward_failed = false;
}

void Chain::launch_backward(std::size_t index) {
  Layer& layer = layers_[index];
  const c10::Stream side = layer.target.stream().value_or(backward_stream());
  runtime_->record(fork_, runtime_->current_stream());
  runtime_->wait(side, fork_);
  copies_.before_backward(index, side);
  const std::uint64_t replays = counts_.replays;
  try {
    launch(layer.backward, side, layer.backward_done, layer.target.event().get());
    layer.backward_launched = true;
    copies_.backward_launched(index);
    use_.launched(copies_.place_of_backward(index));
  } catch (...) {
    if (counts_.replays != replays) {  // the launch itself went well
      layer.backward_launched = layer.backward_failed = true;
      copies_.backward_launched(index);
      settle_pending(index);
    }
    settle(side);
    throw;
  }
}

void Chain::settle_pending(std::size_t index) noexcept {
  layers_[index].pending = false;
  while (top_ >= 0 && !layers_[static_cast<std::size_t>(top_)].pending) {
    --top_;  // so that all backwards of a pass together look at each layer once
  }
  if (top_ < 0) {
    use_.idle(layers_.front().ungiven_bytes());  // no other layer has any
  }
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
