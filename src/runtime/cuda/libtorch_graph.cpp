// Captures and graphs as LibTorch makes them, and what its cuBLAS keeps for their streams.
#include "runtime/cuda/libtorch_graph.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include "runtime/cuda/capture_mode.h"
#include "runtime/cuda/error.h"
#include "runtime/cuda/generator_set.h"
#include "sidestream/error.h"

namespace sidestream::cuda::libtorch {
namespace {

// LibTorch has given back what it had cached before it says so.
[[noreturn]] void throw_no_room(const c10::OutOfMemoryError& error) {
  (void)cudaGetLastError();
  throw DeviceError(
      std::string("a capture could not begin, the device is full; use a smaller batch, or graph fewer calls: ") +
          error.what_without_backtrace(),
      cudaErrorMemoryAllocation);
}

}  // namespace

void warm_blas(c10::Stream stream) {
  const c10::cuda::CUDAStreamGuard guard(stream);
  try {
    (void)at::cuda::getCurrentCUDABlasHandle();
    (void)at::cuda::getCUDABlasLtWorkspace();
  } catch (const c10::OutOfMemoryError& error) {
    throw_no_room(error);
  }
}

template <typename Visit>
void with_blas_workspaces(Visit visit) {
  for (auto* workspaces :
       {&at::cuda::cublas_handle_stream_to_workspace(), &at::cuda::cublaslt_handle_stream_to_workspace()}) {
    const std::unique_lock lock(workspaces->mutex);
    visit(workspaces->map);
  }
}

void forget_stream(cudaStream_t stream) noexcept {
  attempt("freeing a stream's workspaces", [&] {
    with_blas_workspaces(
        [&](auto& map) { std::erase_if(map, [&](const auto& entry) { return std::get<1>(entry.first) == stream; }); });
  });
}

// Note [Workspaces of a capture]
// What a capture added to cuBLAS's workspaces is freed at its end.
//
// cuBLAS works on memory that LibTorch allocates once for each pair of handle and stream, and never frees. If a capture is the first to
// use a pair (autograd's device thread has a handle of its own), that memory comes from the capture's pool, which could then never be
// freed. The graph keeps the address, as it does for every temporary of a capture. The next product outside of it allocates again.
//
// Workspaces of eager passes on the capture's stream are freed before the capture. If a pass threw and no capture follows, they are freed
// too (Runtime::forget_workspaces). A workspace outside of the pool would otherwise take memory as long as the stream lives.
class BlasWorkspaces {
 public:
  void begin() {
    with_blas_workspaces([&](const auto& map) {
      for (const auto& [key, memory] : map) {
        before_.insert(key);
      }
    });
  }

  // Called while the streams still capture: that tells the capture's entries from other threads' new ones.
  void end() {
    with_blas_workspaces([&](auto& map) {
      std::erase_if(map, [&](const auto& entry) {
        return before_.count(entry.first) == 0 && captures(std::get<1>(entry.first));
      });
    });
    before_.clear();
  }

 private:
  static bool captures(void* stream) {
    auto status = cudaStreamCaptureStatusNone;
    return stream != nullptr && cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) == cudaSuccess &&
           status != cudaStreamCaptureStatusNone;
  }

  std::set<std::tuple<void*, void*>> before_;
};

/// Graphs register with the device's generators when they begin, and unregister when they are destroyed, on any thread: one at a time.
std::mutex& generators_graphs() {
  static auto* const mutex = new std::mutex();
  return *mutex;
}

// If an end fails, the base class does not end the capture's state of the allocator and the generators; `stop` undoes both.
struct Graph::Impl : at::cuda::CUDAGraph {
  Impl() : at::cuda::CUDAGraph(true) {}

  // The generators are no capture's any more. A begin that fails in a generator's own prologue has marked it already.
  void release_generators() noexcept {
    for (const auto& [state, increment] : captured_generator_states_) {
      state->capturing_ = false;
    }
  }

  // A generator that found no room for its seed and offset does not know of this graph, and nothing is to end there.
  void forget_unregistered() {
    for (auto item = captured_generator_states_.begin(); item != captured_generator_states_.end();) {
      if (item->first->registered_graphs_.count(this) == 0) {
        item = captured_generator_states_.erase(item);
      } else {
        ++item;
      }
    }
  }

  // Ends the allocators' redirection to the pool, and gives back the reference to the pool that came with it.
  void stop(bool keep_pool) noexcept {
    release_generators();
    attempt("leaving a memory pool",
            [&] { c10::cuda::CUDACachingAllocator::get()->endAllocateToPool(capture_dev_, mempool_id_); });
    attempt("leaving a pinned memory pool",
            [&] { at::getHostAllocator(c10::DeviceType::CUDA)->end_allocate_to_pool(mempool_id_); });
    if (!keep_pool) {
      release_pool(c10::Device(c10::DeviceType::CUDA, capture_dev_), mempool_id_);
    }
  }

  [[nodiscard]] bool redirected() const noexcept { return capture_dev_ != UNDEFINED_DEVICE; }

  cudaError_t finish() noexcept {
    const RelaxedCapture relaxed;
    attempt("freeing a capture's workspaces", [&] { workspaces_.end(); });
    const auto status = cudaStreamEndCapture(capture_stream_.stream(), &graph_);
    const bool complete = status == cudaSuccess && graph_ != nullptr;
    std::uint64_t increments = 0;
    for (auto& [state, increment] : captured_generator_states_) {
      increment = state->offset_intragraph_;
      increments += increment;
    }
    stop(complete);
    if (complete) {
      draws_ = increments != 0;
      capture_ended_ = true;
      has_graph_ = true;
      return cudaSuccess;
    }
    if (graph_ != nullptr) {
      (void)cudaGraphDestroy(graph_);
      graph_ = nullptr;
    }
    (void)cudaGetLastError();
    return status == cudaSuccess ? cudaErrorStreamCaptureInvalidated : status;
  }

  void begin(PoolId pool, c10::ArrayRef<at::Generator> generators) {
    generators_ = GeneratorSet(at::cuda::detail::getDefaultCUDAGenerator(), generators);
    for (const at::Generator& generator : generators) {
      register_generator_state(generator);
    }
    workspaces_.begin();
    capture_begin(pool, cudaStreamCaptureModeThreadLocal);
  }

  [[nodiscard]] cudaGraph_t graph() const noexcept { return graph_; }
  [[nodiscard]] bool draws() const noexcept { return draws_; }
  [[nodiscard]] const GeneratorSet& generators() const noexcept { return generators_; }
  [[nodiscard]] cudaGraphExec_t executable() const noexcept { return graph_exec_; }

 private:
  BlasWorkspaces workspaces_;
  GeneratorSet generators_;
  bool draws_ = false;
};

Graph::Graph() : impl_(std::make_unique<Impl>()) {}

Graph::~Graph() {
  const RelaxedCapture relaxed;
  const std::lock_guard lock(generators_graphs());
  attempt("destroying a graph", [&] { impl_.reset(); });
}

void Graph::begin(c10::Stream stream, PoolId pool, c10::ArrayRef<at::Generator> generators) {
  const c10::cuda::CUDAStreamGuard guard(stream);
  forget_stream(native_stream(stream));
  const std::lock_guard lock(generators_graphs());
  try {
    impl_->begin(pool, generators);
  } catch (const c10::Error& error) {
    (void)cudaGetLastError();
    impl_->release_generators();
    impl_->forget_unregistered();
    if (impl_->redirected()) {
      impl_->stop(false);
    }
    if (const auto* no_room = dynamic_cast<const c10::OutOfMemoryError*>(&error); no_room != nullptr) {
      throw_no_room(*no_room);
    }
    throw CaptureError(std::string("a capture could not begin: ") + error.what_without_backtrace());
  }
}

cudaError_t Graph::end() noexcept { return impl_->finish(); }

cudaError_t Graph::instantiate(c10::Stream stream) {
  try {
    impl_->instantiate();
  } catch (const c10::AcceleratorError& error) {
    (void)cudaGetLastError();
    return static_cast<cudaError_t>(error.get_error_code());
  }
  const cudaError_t status = cudaGraphUpload(impl_->executable(), native_stream(stream));
  (void)cudaGetLastError();
  return status;
}

void Graph::launch(c10::Stream stream) {
  if (!impl_->draws()) [[likely]] {
    check(cudaGraphLaunch(impl_->executable(), native_stream(stream)), "cudaGraphLaunch", "graph");
    return;
  }
  const c10::cuda::CUDAStreamGuard guard(stream);
  const GeneratorSet::Lock lock(impl_->generators());
  impl_->replay();
}

cudaGraph_t Graph::native() const noexcept { return impl_->graph(); }

bool Graph::draws() const noexcept { return impl_->draws(); }

}  // namespace sidestream::cuda::libtorch
