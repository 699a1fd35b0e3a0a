// Outputs whose memory other graphs of the sequence use again; see Note [Graph choreography] in graph_sequence.cpp.
#include <algorithm>
#include <exception>
#include <utility>

#include "graphs/sequence/graph_sequence.h"

namespace sidestream {

// The pool gave memory that a graph frees while it runs to outputs of later forwards. The reverse does not happen: earlier outputs were
// alive at the graph's capture. So the graph overwrites outputs that later forwards gave out in an earlier pass.
void GraphSequence::overwrite_later_outputs(std::size_t graph_index) {
  const std::size_t first = captured_.order.first_run_from(graph_index);
  if (first == captured_.order.runs()) {
    return;
  }
  for (std::size_t later = std::max(first, highest_given_) + 1; later-- > first;) {
    for (OutputStorage& storage : captured_.calls[later].output_storages) {
      storage.before_overwrite(*runtime_, fork_, counts_.outputs);
    }
  }
}

void GraphSequence::overwrite_released_outputs(std::size_t graph_index) {
  captured_.released_outputs.before_launch(graph_index, [&](const Link& output) {
    captured_.calls[output.call].output_storages[output.index].before_overwrite(*runtime_, fork_, counts_.outputs);
  });
}

void GraphSequence::overwrite_given_gradients(std::size_t graph_index) {
  while (!gave_gradients_.empty() && captured_.order.backward_index(gave_gradients_.back()) >= graph_index) {
    captured_.calls[gave_gradients_.back()].for_each_given_gradient([&](std::optional<OutputStorage>& memory) {
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
  if (storage.held() && captured_.memory->shared()) {
    captured_.memory->leave_behind(std::move(storage));
  }  // else its holder keeps the pool, whose graphs are gone
}

void GraphSequence::part_with_outputs() noexcept {
  for (CapturedCall& call : captured_.calls) {
    for (OutputStorage& storage : call.output_storages) {
      if (storage.given_back() || !storage.held()) {  // else its holder keeps the memory
        part_with(storage, counts_.outputs);
      }
    }
    call.for_each_given_gradient([&](std::optional<OutputStorage>& memory) {
      if (memory && (captured_.memory->shared() || !memory->held())) {
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
