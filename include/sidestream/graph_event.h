#pragma once
#include <memory>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "sidestream/detail/export.h"

namespace sidestream {

class GraphEventState;

/// An event that graphs record when their compute is done and that the caller's own streams wait for [cuda_graph_event].
class SIDESTREAM_API GraphEvent {
 public:
  /// Throws: DeviceError where `device` cannot be used.
  explicit GraphEvent(c10::Device device);
  GraphEvent(const GraphEvent&) = delete;
  GraphEvent& operator=(const GraphEvent&) = delete;
  ~GraphEvent();
  /// Later work on `stream` waits for the launch that recorded the event last. Capture: illegal.
  void wait(c10::Stream stream) const;

 private:
  friend class GraphEventState;
  std::unique_ptr<GraphEventState> state_;
};

}  // namespace sidestream
