#include <cstdio>

#include "runtime/cuda/cuda_runtime.h"
#include "runtime/cuda/error.h"
#include "runtime/cuda/graph_nodes.h"
#include "sidestream/error.h"

namespace sidestream::cuda {
namespace {

// A call that the driver forbids on a capturing stream: it fails, and the capture is invalid from then on.
void invalidate(cudaStream_t stream) noexcept {
  (void)cudaStreamSynchronize(stream);
  (void)cudaGetLastError();
}

}  // namespace

bool CudaRuntime::capturing(cudaStream_t stream) const {
  if (!captures_.any()) [[likely]] {
    return false;
  }
  auto status = cudaStreamCaptureStatusNone;
  const auto answer = cudaStreamIsCapturing(stream, &status);
  if (answer == cudaErrorStreamCaptureImplicit) {
    (void)cudaGetLastError();
    return false;
  }
  check(answer, "cudaStreamIsCapturing", "stream");
  return status != cudaStreamCaptureStatusNone;
}

void CudaRuntime::forbid_while_capturing(const char* what) {
  if (!captures_.any()) [[likely]] {
    return;
  }
  const std::vector<c10::StreamId> mine = captures_.of_this_thread();
  for (const c10::StreamId stream : mine) {
    invalidate(libtorch::native_stream(c10::Stream(c10::Stream::UNSAFE, device_, stream)));
  }
  if (!mine.empty()) {
    throw CaptureError(std::string(what) +
                       " is not allowed while the calling thread captures; do it before the capture begins");
  }
}

void CudaRuntime::begin_capture(c10::Stream stream, const MemoryPool& pool, c10::ArrayRef<at::Generator> generators) {
  auto* const queue = native(stream);
  const auto& id = *static_cast<const libtorch::PoolId*>(native(pool));
  if (queue == nullptr) {
    throw CaptureError("the default stream cannot be captured; capture a stream that the runtime created");
  }
  if (capture_status(stream) != CaptureStatus::none) {
    throw CaptureError("the stream is already capturing; end or abandon that capture first");
  }
  for (const at::Generator& generator : generators) {
    if (!generator.defined() || generator.device() != device_) {
      throw UsageError("the capture was given a generator of " +
                       (generator.defined() ? generator.device().str() : std::string("no device")) + "; make it for " +
                       device_.str());
    }
  }
  const CurrentDevice current(device_);
  libtorch::warm_blas(stream);
  captures_.open({stream.id(), std::this_thread::get_id(), this, id, std::make_unique<libtorch::Graph>()},
                 [&](libtorch::Graph& graph) { graph.begin(stream, id, generators); });
}

Graph CudaRuntime::end_capture(c10::Stream stream) {
  (void)native(stream);
  const CurrentDevice current(device_);
  OpenCapture capture = captures_.take(stream);
  const auto status = capture.graph->end();
  if (status != cudaSuccess) {
    capture.graph.reset();
    destroy_deferred();
    throw_status(status, "cudaStreamEndCapture", "graph", std::source_location::current());
  }
  destroy_deferred();
  instantiate(*capture.graph, stream);
  return {*this, capture.graph.release()};
}

// The device memory that the graph takes besides its tensors is allocated here, and not at a launch in the middle of a step.
void CudaRuntime::instantiate(libtorch::Graph& graph, c10::Stream stream) {
  cudaError_t status = graph.instantiate(stream);
  if (status == cudaErrorMemoryAllocation) {
    libtorch::release_cached_memory();
    status = graph.instantiate(stream);
  }
  if (status == cudaSuccess) {
    return;
  }
  if (status != cudaErrorMemoryAllocation) {
    throw_status(status, "cudaGraphInstantiate and cudaGraphUpload", "graph", std::source_location::current());
  }
  graphs_refused_.fetch_add(1, std::memory_order_relaxed);
  refused_behind_ = libtorch::memory_stats(device_).refusals;
  std::size_t free = 0;
  std::size_t total = 0;
  (void)cudaMemGetInfo(&free, &total);
  (void)cudaGetLastError();
  std::size_t count = 0;
  check(cudaGraphGetNodes(graph.native(), nullptr, &count), "cudaGraphGetNodes", "graph");
  throw DeviceError("the captured graph of " + std::to_string(count) + " nodes does not fit beside its tensors: " +
                        std::to_string(free) + " of " + std::to_string(total) + " bytes of " + device_.str() +
                        " are free, LibTorch holds " + std::to_string(memory_stats().reserved) +
                        "; offload more, graph fewer calls, or use a smaller batch",
                    status);
}

void CudaRuntime::abandon_capture(c10::Stream stream) noexcept {
  try {
    OpenCapture capture = captures_.take(stream);
    (void)capture.graph->end();
  } catch (const Error&) {
    return;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sidestream: a capture could not be discarded: %s\n", error.what());
  }
  destroy_deferred();
}

CaptureStatus CudaRuntime::capture_status(c10::Stream stream) const {
  auto status = cudaStreamCaptureStatusNone;
  const OnItsDevice on_device(native(stream), device_);
  const auto answer = cudaStreamIsCapturing(native(stream), &status);
  if (answer == cudaErrorStreamCaptureImplicit) {
    (void)cudaGetLastError();
    return CaptureStatus::none;
  }
  check(answer, "cudaStreamIsCapturing", "stream");
  switch (status) {
    case cudaStreamCaptureStatusNone:
      return CaptureStatus::none;
    case cudaStreamCaptureStatusActive:
      return CaptureStatus::active;
    case cudaStreamCaptureStatusInvalidated:
      return CaptureStatus::invalidated;
  }
  return CaptureStatus::none;
}

void CudaRuntime::launch(const Graph& graph, c10::Stream stream) {
  auto* const queue = native(stream);
  auto* const executable = static_cast<libtorch::Graph*>(native(graph));
  const OnItsDevice on_device(queue, device_);
  if (capturing(queue)) [[unlikely]] {
    invalidate(queue);
    throw CaptureError("a graph cannot be launched on a stream that captures; launch it after the capture");
  }
  executable->launch(stream);
}

bool CudaRuntime::draws(const Graph& graph) const {
  return static_cast<const libtorch::Graph*>(native(graph))->draws();
}

std::vector<GraphNode> CudaRuntime::nodes(const Graph& graph) const {
  return nodes_of(static_cast<const libtorch::Graph*>(native(graph))->native());
}

std::size_t CudaRuntime::captured_nodes(c10::Stream stream) const {
  const OnItsDevice on_device(native(stream), device_);
  return captured_nodes_of(native(stream));
}

}  // namespace sidestream::cuda
