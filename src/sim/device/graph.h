#pragma once
#include <cstddef>
#include <vector>

#include "runtime/runtime.h"
#include "sim/device/capture.h"
#include "sim/device/device.h"

namespace sidestream::sim {

/// Device memory that a graph takes for each node that a driver would list, besides the memory of its tensors.
inline constexpr std::size_t graph_node_bytes = 512;

/// A captured graph: its nodes, and a reference to the pool whose addresses they use.
struct GraphBody {
  /// Throws: DeviceError if the device has no room for the nodes.
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
  const std::size_t bytes;     ///< of the device, for the nodes
};

}  // namespace sidestream::sim
