#pragma once
#include <cstddef>
#include <vector>

#include <cuda_runtime_api.h>

#include "runtime/graph_node.h"

namespace sidestream::cuda {

/// The nodes of `graph` and of its child graphs as the driver lists them, in capture order. Throws: DeviceError.
[[nodiscard]] std::vector<GraphNode> nodes_of(cudaGraph_t graph);

/// How many nodes the capture of `stream` holds so far; 0 if it does not capture. Capture: legal. Throws: DeviceError.
[[nodiscard]] std::size_t captured_nodes_of(cudaStream_t stream);

}  // namespace sidestream::cuda
