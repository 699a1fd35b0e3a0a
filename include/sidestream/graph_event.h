#pragma once
#include <memory>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "sidestream/detail/export.h"

namespace sidestream {

class GraphEventState;

/// An event that graphs record when their compute is done, and for which the caller's own streams can wait [cuda_graph_event].
class SIDESTREAM_API GraphEvent {
 public:
  /// An event on `device`.  Throws: DeviceError if `device` cannot be used.
  explicit GraphEvent(c10::Device device);
  GraphEvent(const GraphEvent&) = delete;
  GraphEvent& operator=(const GraphEvent&) = delete;
  ~GraphEvent();
  /// Makes later work on `stream` wait for the compute of the latest launch that records the event.  Capture: illegal.
  void wait(c10::Stream stream) const;

 private:
  friend class GraphEventState;
  std::unique_ptr<GraphEventState> state_;
};

}  // namespace sidestream
