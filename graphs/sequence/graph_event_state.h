#pragma once
#include <memory>

#include "runtime/runtime.h"
#include "sidestream/graph_event.h"

namespace sidestream {

/// The state that a GraphEvent owns.
class GraphEventState {
 public:
  explicit GraphEventState(std::shared_ptr<Runtime> runtime)
      : runtime_(std::move(runtime)), event_(runtime_->create_external_event()) {}

  [[nodiscard]] static const ExternalEvent& event_of(const GraphEvent& event) noexcept { return event.state_->event_; }
  [[nodiscard]] static c10::Device device_of(const GraphEvent& event) noexcept {
    return event.state_->runtime_->device();
  }
  void wait(c10::Stream stream) const { runtime_->wait(stream, event_); }

 private:
  std::shared_ptr<Runtime> runtime_;
  ExternalEvent event_;
};

}  // namespace sidestream
