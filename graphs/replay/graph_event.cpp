#include "graphs/replay/graph_event_state.h"

namespace sidestream {

GraphEvent::GraphEvent(c10::Device device) : state_(std::make_unique<State>()) {
  state_->runtime = make_runtime(device);
  state_->event = state_->runtime->create_external_event();
}

GraphEvent::~GraphEvent() = default;

void GraphEvent::wait(c10::Stream stream) const { state_->runtime->wait(stream, state_->event); }

}  // namespace sidestream
