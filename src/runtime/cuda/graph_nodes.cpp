#include "runtime/cuda/graph_nodes.h"

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>

#include "runtime/cuda/error.h"

namespace sidestream::cuda {
namespace {

cudaGraphNodeType type_of(cudaGraphNode_t node) {
  auto type = cudaGraphNodeTypeEmpty;
  check(cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType", "graph node");
  return type;
}

GraphNode::Memory memory_at(const void* address) {
  cudaPointerAttributes attributes{};
  const auto status = cudaPointerGetAttributes(&attributes, address);
  (void)cudaGetLastError();
  if (status != cudaSuccess) {
    return GraphNode::Memory::unknown;
  }
  switch (attributes.type) {
    case cudaMemoryTypeDevice:
    case cudaMemoryTypeManaged:
      return GraphNode::Memory::device;
    case cudaMemoryTypeHost:
      return GraphNode::Memory::pinned;
    case cudaMemoryTypeUnregistered:
      return GraphNode::Memory::pageable;
  }
  return GraphNode::Memory::unknown;
}

bool on_host(GraphNode::Memory memory) {
  return memory == GraphNode::Memory::pinned || memory == GraphNode::Memory::pageable;
}

// Copies of arrays have no addresses: their ends stay unknown.
void describe_copy(cudaGraphNode_t node, GraphNode& out) {
  out.kind = GraphNode::Kind::copy;
  cudaMemcpy3DParms copy{};
  if (cudaGraphMemcpyNodeGetParams(node, &copy) != cudaSuccess || copy.srcPtr.ptr == nullptr ||
      copy.dstPtr.ptr == nullptr) {
    (void)cudaGetLastError();
    return;
  }
  out.source = copy.srcPtr.ptr;
  out.destination = copy.dstPtr.ptr;
  out.bytes = copy.extent.width * copy.extent.height * copy.extent.depth;
  out.source_memory = memory_at(out.source);
  out.destination_memory = memory_at(out.destination);
  if (on_host(out.source_memory) != on_host(out.destination_memory)) {
    out.kind = on_host(out.source_memory) ? GraphNode::Kind::copy_to_device : GraphNode::Kind::copy_to_host;
  }
}

void describe_memset(cudaGraphNode_t node, GraphNode& out) {
  out.kind = GraphNode::Kind::memset;
  cudaMemsetParams set{};
  if (cudaGraphMemsetNodeGetParams(node, &set) != cudaSuccess) {
    (void)cudaGetLastError();
    return;
  }
  out.destination = set.dst;
  out.bytes = set.width * set.elementSize * set.height;
  out.destination_memory = memory_at(set.dst);
}

// Kernels that a library launches through the driver have no function of the runtime, and so no name here.
void describe_kernel([[maybe_unused]] cudaGraphNode_t node, GraphNode& out) {
  out.kind = GraphNode::Kind::kernel;
#if CUDART_VERSION >= 12030
  cudaKernelNodeParams kernel{};
  const char* name = nullptr;
  if (cudaGraphKernelNodeGetParams(node, &kernel) == cudaSuccess && kernel.func != nullptr &&
      cudaFuncGetName(&name, kernel.func) == cudaSuccess && name != nullptr) {
    out.name = name;
  }
  (void)cudaGetLastError();
#endif
}

GraphNode describe(cudaGraphNode_t node) {
  GraphNode out;
  cudaEvent_t event = nullptr;
  switch (type_of(node)) {
    case cudaGraphNodeTypeKernel:
      describe_kernel(node, out);
      break;
    case cudaGraphNodeTypeMemcpy:
      describe_copy(node, out);
      break;
    case cudaGraphNodeTypeMemset:
      describe_memset(node, out);
      break;
    case cudaGraphNodeTypeEmpty:
      out.kind = GraphNode::Kind::empty;
      break;
    case cudaGraphNodeTypeEventRecord:
      out.kind = GraphNode::Kind::event_record;
      check(cudaGraphEventRecordNodeGetEvent(node, &event), "cudaGraphEventRecordNodeGetEvent", "graph node");
      break;
    case cudaGraphNodeTypeWaitEvent:
      out.kind = GraphNode::Kind::event_wait;
      check(cudaGraphEventWaitNodeGetEvent(node, &event), "cudaGraphEventWaitNodeGetEvent", "graph node");
      break;
    case cudaGraphNodeTypeHost:
      out.kind = GraphNode::Kind::host;
      break;
    case cudaGraphNodeTypeGraph:
      out.kind = GraphNode::Kind::child;
      break;
    case cudaGraphNodeTypeExtSemaphoreSignal:
    case cudaGraphNodeTypeExtSemaphoreWait:
    case cudaGraphNodeTypeMemAlloc:
    case cudaGraphNodeTypeMemFree:
    case cudaGraphNodeTypeConditional:
    case cudaGraphNodeTypeCount:
      out.kind = GraphNode::Kind::other;
      break;
  }
  out.event = event;
  return out;
}

std::vector<cudaGraphNode_t> handles_of(cudaGraph_t graph) {
  std::size_t count = 0;
  check(cudaGraphGetNodes(graph, nullptr, &count), "cudaGraphGetNodes", "graph");
  std::vector<cudaGraphNode_t> handles(count);
  check(cudaGraphGetNodes(graph, handles.data(), &count), "cudaGraphGetNodes", "graph");
  return handles;
}

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

// The nodes of one graph, then those of its child graphs.
void append(cudaGraph_t graph, std::vector<GraphNode>& nodes) {
  const auto first = static_cast<std::uint32_t>(nodes.size());
  const std::vector<cudaGraphNode_t> handles = handles_of(graph);
  std::unordered_map<cudaGraphNode_t, std::uint32_t> index;
  for (const auto handle : handles) {
    index.emplace(handle, static_cast<std::uint32_t>(nodes.size()));
    nodes.push_back(describe(handle));
  }
  for (const auto& [from, to] : edges_of(graph)) {
    nodes[index.at(to)].predecessors.push_back(index.at(from));
  }
  for (std::uint32_t i = 0; i < handles.size(); ++i) {
    const std::uint32_t child = first + i;
    if (nodes[child].kind != GraphNode::Kind::child) {
      continue;
    }
    cudaGraph_t held = nullptr;
    check(cudaGraphChildGraphNodeGetGraph(handles[i], &held), "cudaGraphChildGraphNodeGetGraph", "graph node");
    const auto begin = static_cast<std::uint32_t>(nodes.size());
    append(held, nodes);
    const std::vector<std::uint32_t> before = nodes[child].predecessors;
    for (auto inner = begin; inner < nodes.size(); ++inner) {
      if (nodes[inner].predecessors.empty()) {
        nodes[inner].predecessors = before;
      }
      nodes[child].predecessors.push_back(inner);
    }
  }
}

}  // namespace

std::vector<GraphNode> nodes_of(cudaGraph_t graph) {
  std::vector<GraphNode> nodes;
  append(graph, nodes);
  return nodes;
}

std::size_t captured_nodes_of(cudaStream_t stream) {
  auto status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
  check(cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph, nullptr, nullptr, nullptr),
        "cudaStreamGetCaptureInfo", "stream");
#else
  check(cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, &graph, nullptr, nullptr), "cudaStreamGetCaptureInfo",
        "stream");
#endif
  if (status != cudaStreamCaptureStatusActive || graph == nullptr) {
    return 0;
  }
  std::size_t count = 0;
  check(cudaGraphGetNodes(graph, nullptr, &count), "cudaGraphGetNodes", "graph");
  return count;
}

}  // namespace sidestream::cuda
