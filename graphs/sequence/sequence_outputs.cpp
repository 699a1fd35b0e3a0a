// Outputs whose memory other graphs of the sequence use again; see Note [Graph choreography] in graph_sequence.cpp.
#include <algorithm>
#include <exception>
#include <utility>

#include "graphs/sequence/graph_sequence.h"

namespace sidestream {

bool GraphSequence::is_linked_output(const StaticInput& input, const at::Tensor& given) const {
  const CapturedCall& giver = calls_[input.from->call];
  return given.has_storage() && giver.output_storages[giver.outputs[input.from->index].of].gave(given.storage()) &&
         given.storage_offset() == input.tensor.storage_offset() && same_layout(given, input.tensor);
}

// The pool gave memory that a graph frees while it runs to outputs of later forwards. The reverse does not happen: earlier outputs were
// alive at the graph's capture. So the graph overwrites outputs that later forwards gave out in an earlier pass.
void GraphSequence::overwrite_later_outputs(std::size_t graph_index) {
  const std::size_t first = order_.first_run_from(graph_index);
  if (first == order_.runs()) {
    return;
  }
  for (std::size_t later = std::max(first, highest_given_) + 1; later-- > first;) {
    for (OutputStorage& storage : calls_[later].output_storages) {
      storage.before_overwrite(*runtime_, fork_, counts_.outputs);
    }
  }
}

void GraphSequence::overwrite_released_outputs(std::size_t graph_index) {
  released_.before_launch(graph_index, [&](const Link& output) {
    calls_[output.call].output_storages[output.index].before_overwrite(*runtime_, fork_, counts_.outputs);
  });
}

void GraphSequence::overwrite_given_gradients(std::size_t graph_index) {
  while (!gave_gradients_.empty() && order_.backward_index(gave_gradients_.back()) >= graph_index) {
    calls_[gave_gradients_.back()].for_each_given_gradient([&](std::optional<OutputStorage>& memory) {
      if (memory) {
        memory->before_overwrite(*runtime_, fork_, counts_.gradients);
      }
    });
    gave_gradients_.pop_back();
  }
}

void GraphSequence::part_with(OutputStorage& storage, OutputCounts& counts) noexcept {
  try {
    if (runtime_->capture_status(runtime_->current_stream()) == CaptureStatus::none) {
      storage.before_overwrite(*runtime_, fork_, counts);
      return;
    }
  } catch (const std::exception&) {  // no room, or the device has failed
  }
  if (storage.held() && memory_->shared()) {
    memory_->leave_behind(std::move(storage));
  }  // else its holder keeps the pool, whose graphs are gone
}

void GraphSequence::part_with_outputs() noexcept {
  for (CapturedCall& call : calls_) {
    for (OutputStorage& storage : call.output_storages) {
      if (storage.given_back() || !storage.held()) {  // else its holder keeps the memory
        part_with(storage, counts_.outputs);
      }
    }
    call.for_each_given_gradient([&](std::optional<OutputStorage>& memory) {
      if (memory && (memory_->shared() || !memory->held())) {
        part_with(*memory, counts_.gradients);
      }
    });
  }
  try {  // the memory may go now
    const c10::Stream now = runtime_->current_stream();
    if (runtime_->capture_status(now) == CaptureStatus::none) {
      follow_latest_call();
      copies_.join(now);  // another sequence may write the memory, and the pinned slots, next
      runtime_->synchronize(now);
    }
  } catch (const std::exception&) {  // the device has failed: nothing runs any more
  }
}

}  // namespace sidestream
