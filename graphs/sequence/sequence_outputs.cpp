#include "graphs/sequence/sequence_outputs.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace sidestream {

SequenceOutputs::SequenceOutputs(std::shared_ptr<Runtime> runtime, CapturedCalls& calls, const SequenceOrder& order,
                                 const std::vector<ReleasedOutput>& released, const Event& mark)
    : runtime_(std::move(runtime)), calls_(calls), order_(order), released_(released), mark_(mark) {
  gave_gradients_.reserve(calls_.size());
}

void SequenceOutputs::before_launch(std::size_t graph_index) {
  overwrite_later(graph_index);
  if (!order_.is_backward(graph_index)) {
    highest_given_ = order_.run_at(graph_index);
  }
  overwrite_released(graph_index);
  overwrite_gradients(graph_index);
}

void SequenceOutputs::overwrite_outputs_of(CapturedCall& call) {
  for (OutputStorage& storage : call.output_storages) {
    storage.before_overwrite(*runtime_, mark_, counts_.outputs);
  }
}

// The pool gave memory that a graph frees while it runs to outputs of later forwards. The reverse does not happen: earlier outputs were
// alive at the graph's capture. So the graph overwrites outputs that later forwards gave out in an earlier pass.
void SequenceOutputs::overwrite_later(std::size_t graph_index) {
  const std::size_t first = order_.first_run_from(graph_index);
  if (first == order_.runs()) {
    return;
  }
  for (std::size_t later = std::max(first, highest_given_) + 1; later-- > first;) {
    overwrite_outputs_of(calls_[later]);
  }
}

void SequenceOutputs::overwrite_released(std::size_t graph_index) {
  while (next_released_ > 0 && released_[next_released_ - 1].graph_index > graph_index) {  // a pass begins anew
    --next_released_;
  }
  for (; next_released_ < released_.size() && released_[next_released_].graph_index <= graph_index; ++next_released_) {
    const Link& output = released_[next_released_].output;
    if (std::vector<OutputStorage>& storages = calls_[output.call].output_storages; !storages.empty()) {
      storages[output.index].before_overwrite(*runtime_, mark_, counts_.outputs);
    }  // else the call gave them up
  }
}

void SequenceOutputs::overwrite_gradients(std::size_t graph_index) {
  while (!gave_gradients_.empty() && order_.backward_index(gave_gradients_.back()) >= graph_index) {
    calls_[gave_gradients_.back()].for_each_given_gradient([&](std::optional<OutputStorage>& memory) {
      if (memory) {
        memory->before_overwrite(*runtime_, mark_, counts_.gradients);
      }
    });
    gave_gradients_.pop_back();
  }
}

void SequenceOutputs::copy_out_all() {
  for (CapturedCall& call : calls_) {
    overwrite_outputs_of(call);
  }
  overwrite_gradients(0);
}

void SequenceOutputs::release(std::size_t index) noexcept {
  CapturedCall& call = calls_[index];
  try {
    overwrite_outputs_of(call);
    call.for_each_given_gradient([&](std::optional<OutputStorage>& memory) {
      if (memory && !memory->held()) {
        memory->before_overwrite(*runtime_, mark_, counts_.gradients);
      }
    });
    if (call.replay.generation > 0) {  // the memory may be freed now, after all work that reads it
      runtime_->synchronize(runtime_->current_stream());
    }
  } catch (const std::exception&) {  // no room: its holders keep it, and it is copied out if a graph would overwrite it
    return;
  }
  call.output_storages.clear();
  for (StaticOutput& output : call.outputs) {
    output.tensor = output.owner = output.seed = at::Tensor();
  }
}

void SequenceOutputs::copy_out_or_keep(OutputStorage& storage, GraphMemory& memory,
                                       OutputStorage::Counts& counts) noexcept {
  try {
    if (runtime_->capture_status(runtime_->current_stream()) == CaptureStatus::none) {
      storage.before_overwrite(*runtime_, mark_, counts);
      return;
    }
  } catch (const std::exception&) {  // no room, or the device has failed
  }
  if (storage.held() && memory.shared()) {
    memory.keep_held(std::move(storage));
  }  // else its holder keeps the pool, whose graphs are gone
}

void SequenceOutputs::copy_out_at_end(GraphMemory& memory) noexcept {
  for (CapturedCall& call : calls_) {
    for (OutputStorage& storage : call.output_storages) {
      if (storage.given_back() || !storage.held()) {  // else its holder keeps the memory
        copy_out_or_keep(storage, memory, counts_.outputs);
      }
    }
    call.for_each_given_gradient([&](std::optional<OutputStorage>& gradient) {
      if (gradient && (memory.shared() || !gradient->held())) {
        copy_out_or_keep(*gradient, memory, counts_.gradients);
      }
    });
  }
  gave_gradients_.clear();
}

}  // namespace sidestream
