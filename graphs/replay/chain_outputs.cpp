// Outputs whose memory other graphs of the chain use again; see Note [Graph choreography] in chain.cpp.
#include <exception>

#include "graphs/replay/chain.h"

namespace sidestream {

bool Chain::is_linked_output(const StaticInput& input, const at::Tensor& given) const {
  const Layer& giver = layers_[input.from->layer];
  return given.has_storage() && giver.output_storages[giver.outputs[input.from->index].of].gave(given.storage()) &&
         given.storage_offset() == input.tensor.storage_offset() && same_layout(given, input.tensor);
}

void Chain::overwrite_released_outputs(std::size_t place) {
  released_.before_launch(place, [&](const Link& output) {
    layers_[output.layer].output_storages[output.index].before_overwrite(*runtime_, fork_, counts_.outputs);
  });
}

void Chain::overwrite_given_gradients(std::size_t place) {
  while (!gave_gradients_.empty() && copies_.place_of_backward(gave_gradients_.back()) >= place) {
    for (LayerParameter& parameter : layers_[gave_gradients_.back()].parameters) {
      if (parameter.memory) {
        parameter.memory->before_overwrite(*runtime_, fork_, counts_.gradients);
      }
    }
    gave_gradients_.pop_back();
  }
}

void Chain::part_with_outputs() noexcept {
  try {
    const c10::Stream main = runtime_->current_stream();
    bool copied = false;
    released_.for_each([&](const Link& output) {
      OutputStorage& storage = layers_[output.layer].output_storages[output.index];
      if (storage.held() && runtime_->capture_status(main) == CaptureStatus::none) {
        storage.before_overwrite(*runtime_, fork_, counts_.outputs);
        copied = true;
      }
    });
    if (copied) {  // the pool may go now
      runtime_->synchronize(main);
    }
  } catch (const std::exception&) {  // no room: what is held keeps the pool
  }
  released_.clear();
}

}  // namespace sidestream
