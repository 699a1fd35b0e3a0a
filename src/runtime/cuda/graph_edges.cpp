#include "runtime/cuda/graph_edges.h"

#include <cstddef>

#include "runtime/cuda/error.h"

namespace sidestream::cuda {
namespace {

// Where edges carry data (programmatic launches), a call without room for it is refused: CUDA 12.3 brought one that has it.
#if CUDART_VERSION >= 12030
cudaError_t get_edges(cudaGraph_t graph, cudaGraphNode_t* from, cudaGraphNode_t* to, std::size_t* count) {
  std::vector<cudaGraphEdgeData> data(from == nullptr ? 0 : *count);
  cudaGraphEdgeData* const room = from == nullptr ? nullptr : data.data();
#if CUDART_VERSION >= 13000
  return cudaGraphGetEdges(graph, from, to, room, count);
#else
  return cudaGraphGetEdges_v2(graph, from, to, room, count);
#endif
}
#else
cudaError_t get_edges(cudaGraph_t graph, cudaGraphNode_t* from, cudaGraphNode_t* to, std::size_t* count) {
  return cudaGraphGetEdges(graph, from, to, count);
}
#endif

}  // namespace

std::vector<std::pair<cudaGraphNode_t, cudaGraphNode_t>> edges_of(cudaGraph_t graph) {
  std::size_t count = 0;
  check(get_edges(graph, nullptr, nullptr, &count), "cudaGraphGetEdges", "graph");
  std::vector<cudaGraphNode_t> from(count);
  std::vector<cudaGraphNode_t> to(count);
  if (count > 0) {
    check(get_edges(graph, from.data(), to.data(), &count), "cudaGraphGetEdges", "graph");
  }
  std::vector<std::pair<cudaGraphNode_t, cudaGraphNode_t>> edges;
  edges.reserve(count);
  for (std::size_t edge = 0; edge < count; ++edge) {
    edges.emplace_back(from[edge], to[edge]);
  }
  return edges;
}

}  // namespace sidestream::cuda
