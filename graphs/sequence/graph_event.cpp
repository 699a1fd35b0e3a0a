#include "graphs/sequence/graph_event_state.h"

namespace sidestream {

GraphEvent::GraphEvent(c10::Device device) : state_(std::make_unique<GraphEventState>(make_runtime(device))) {}

GraphEvent::~GraphEvent() = default;

void GraphEvent::wait(c10::Stream stream) const { state_->wait(stream); }

}  // namespace sidestream
