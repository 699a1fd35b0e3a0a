#pragma once
#include <memory>
#include <vector>

#include "runtime/runtime.h"
#include "sim/device/capture.h"
#include "sim/device/device.h"

namespace sidestream::sim {

/// A captured graph: its nodes, and a reference to the pool whose addresses they use.
struct GraphBody {
  GraphBody(Device& owner, const Capture& capture, std::vector<CapturedWork> nodes);
  GraphBody(const GraphBody&) = delete;
  GraphBody& operator=(const GraphBody&) = delete;
  ~GraphBody();

  /// The nodes as a driver would list them: poisons, which no driver has, are left out and their edges passed on.
  [[nodiscard]] std::vector<GraphNode> list() const;

  Device& device;
  Pool& pool;
  const std::vector<CapturedWork> nodes;
  const c10::StreamId origin;  ///< the stream that was captured
  NodeSet sinks;               ///< nodes that no other runs after
  const bool draws;            ///< random numbers
};

}  // namespace sidestream::sim
