#pragma once
#include <memory>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace sidestream {

/// An event that graphs record when their compute is done and that the caller's own streams wait for [cuda_graph_event].
class GraphEvent {
 public:
  /// Throws: as make_runtime for `device`.
  explicit GraphEvent(c10::Device device);
  GraphEvent(const GraphEvent&) = delete;
  GraphEvent& operator=(const GraphEvent&) = delete;
  ~GraphEvent();
  /// Later work on `stream` waits for the launch that recorded the event last. Capture: illegal.
  void wait(c10::Stream stream) const;

  struct State;
  [[nodiscard]] State& state() const { return *state_; }

 private:
  std::unique_ptr<State> state_;
};

}  // namespace sidestream
