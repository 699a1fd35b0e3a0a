#include "runtime/cuda/libtorch.h"

#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "runtime/cuda/capture_mode.h"
#include "runtime/cuda/error.h"
#include "runtime/cuda/generator_set.h"
#include "runtime/replayed_memory.h"
#include "sidestream/error.h"

namespace sidestream::cuda::libtorch {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

c10::cuda::CUDAStream cuda_stream(c10::Stream stream) {
  return c10::cuda::CUDAStream(c10::cuda::CUDAStream::UNCHECKED, stream);
}

at::HostAllocator& host_allocator() { return *at::getHostAllocator(c10::DeviceType::CUDA); }

// Does every step of a clean-up even if one fails.
template <typename Step>
void attempt(const char* what, Step step) noexcept {
  try {
    step();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sidestream: %s failed: %s\n", what, error.what());
  }
}

}  // namespace

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  try {
    return c10::cuda::ExchangeDevice(device);
  } catch (const c10::AcceleratorError& error) {
    throw_status(static_cast<cudaError_t>(error.get_error_code()), "cudaSetDevice", "device",
                 std::source_location::current());
  }
}

void return_to_device(c10::DeviceIndex device) noexcept {
  report(c10::cuda::MaybeSetDevice(device), "cudaSetDevice", "device");
}

std::string allocator_name() { return allocator::name(); }

void initialise() { at::globalContext().lazyInitDevice(c10::DeviceType::CUDA); }

void settle_attention_order(c10::Device device) {
  static std::once_flag once;
  std::call_once(once, [&] {
    const c10::cuda::CUDAGuard on_device(device);
    constexpr std::int64_t kSize = 64;  // that every kernel serves
    const at::Tensor any =
        at::empty({1, 1, kSize, kSize}, at::TensorOptions().device(device).dtype(c10::ScalarType::Half));
    try {
      (void)at::_fused_sdp_choice(any, any, any);
    } catch (const c10::Error&) {  // all of them are switched off: attention itself says so
    }
  });
}

cudaStream_t native_stream(c10::Stream stream) { return cuda_stream(stream).stream(); }

c10::Stream wrap_stream(cudaStream_t stream, c10::Device device) {
  return c10::cuda::getStreamFromExternal(stream, device.index()).unwrap();
}

c10::Stream current_stream(c10::Device device) { return c10::cuda::getCurrentCUDAStream(device.index()).unwrap(); }

void set_current_stream(c10::Stream stream) { c10::cuda::setCurrentCUDAStream(cuda_stream(stream)); }

MemoryStats memory_stats(c10::Device device) {
  const auto all = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto stats = allocator::getDeviceStats(device.index());
  return {stats.allocated_bytes[all].current, stats.allocated_bytes[all].peak, stats.reserved_bytes[all].current,
          stats.reserved_bytes[all].peak, stats.num_ooms};
}

namespace {

/// What the caching allocator was refused, by device. It asks observers without its lock.
class Refusals {
 public:
  static Refusals& all() {
    static auto* const refusals = new Refusals();  // LibTorch tells it for as long as the process lives
    return *refusals;
  }
  [[nodiscard]] MemoryRefusal latest(c10::DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    return latest_[device];
  }

 private:
  Refusals() {
    if (allocator_name() != "native") {  // others have no observers, and make no engine
      return;
    }
    allocator::attachOutOfMemoryObserver([this](std::int64_t device, std::size_t asked, std::size_t, std::size_t free) {
      const auto index = static_cast<c10::DeviceIndex>(device);
      const std::int64_t reserved = memory_stats(c10::Device(c10::DeviceType::CUDA, index)).reserved;
      const std::lock_guard lock(mutex_);
      latest_[index] = {static_cast<std::int64_t>(asked), reserved, static_cast<std::int64_t>(free)};
    });
  }

  std::mutex mutex_;
  std::map<c10::DeviceIndex, MemoryRefusal> latest_;
};

}  // namespace

MemoryRefusal latest_refusal(c10::Device device) { return Refusals::all().latest(device.index()); }

std::int64_t allocator_limit(c10::Device device, std::int64_t total) {
  return static_cast<std::int64_t>(allocator::getMemoryFraction(device.index()) * static_cast<double>(total));
}

void reset_peak_memory_stats(c10::Device device) { allocator::resetPeakStats(device.index()); }

void release_cached_memory() { allocator::emptyCache(); }

void hear_frees(std::function<void(const void* block, std::size_t bytes)> freed) {
  allocator::attachAllocatorTraceTracker([freed = std::move(freed)](const allocator::TraceEntry& entry) {
    if (entry.action_ == allocator::TraceEntry::FREE_REQUESTED) {
      freed(reinterpret_cast<const void*>(entry.addr_), entry.size_);  // NOLINT: LibTorch's number is an address
    }
  });
}

namespace {

void record_stream(at::Tensor& self, c10::Stream stream) {
  allocator::recordStream(self.storage().data_ptr(), cuda_stream(stream));  // all that LibTorch's own kernel does
  ReplayedMemory::used_on(self.storage().data_ptr(), stream);
}

class Silence final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& /*warning*/) override {}
};

}  // namespace

void hear_record_stream() {
  Silence silence;  // LibTorch warns of every kernel that takes another's place
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  // A registration ends with its Library object: this one lives as long as the process.
  static auto* const library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  library->impl("record_stream", &record_stream);
}

// A capture takes a pool of the same name of LibTorch's pinned allocator too, which cannot be taken again once its count was
// zero. The only way to hold a reference to it is to begin and end.
PoolId create_pool(c10::Device device) {
  const PoolId pool = at::cuda::graph_pool_handle();
  allocator::get()->createOrIncrefPool(device.index(), pool);
  host_allocator().begin_allocate_to_pool(pool, [](c10::Stream) { return false; });
  host_allocator().end_allocate_to_pool(pool);
  return pool;
}

void release_pool(c10::Device device, PoolId pool) noexcept {
  attempt("releasing a memory pool", [&] { allocator::get()->releasePool(device.index(), pool); });
  attempt("releasing a pinned memory pool", [&] { host_allocator().release_pool(pool); });
}

std::int64_t allocated_in(PoolId pool) {
  std::size_t bytes = 0;
  for (const auto& segment : allocator::snapshot(pool, /*include_traces=*/false).segments) {
    bytes += segment.allocated_size;
  }
  return static_cast<std::int64_t>(bytes);
}

namespace {

// LibTorch has given back what it had cached before it says so.
[[noreturn]] void throw_no_room(const c10::OutOfMemoryError& error) {
  (void)cudaGetLastError();
  throw DeviceError(std::string("a capture could not begin, the device is full: ") + error.what_without_backtrace(),
                    cudaErrorMemoryAllocation);
}

}  // namespace

void warm_blas(c10::Stream stream) {
  const c10::cuda::CUDAStreamGuard guard(cuda_stream(stream));
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
// cuBLAS works on memory that LibTorch allocates once for each pair of handle and stream and keeps for good. When a pair is
// first met inside a capture (autograd's device thread has a handle of its own), that memory comes from the capture's pool,
// which could then never be given back. So what a capture added is freed at its end: the graph keeps the address, as it does
// with every temporary of a capture, and the next product outside allocates anew. What eager passes on the capture's stream
// left is freed before: a workspace outside of the pool would stay beside it for as long as the stream lives.
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

/// Graphs register with the device's generators when they begin, and leave them when they die, on whatever thread: one at a time.
std::mutex& generators_graphs() {
  static auto* const mutex = new std::mutex();
  return *mutex;
}

// The base class leaves the allocator and the generators in the state of a capture when an end fails; `stop` undoes both.
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
    attempt("leaving a memory pool", [&] { allocator::get()->endAllocateToPool(capture_dev_, mempool_id_); });
    attempt("leaving a pinned memory pool", [&] { host_allocator().end_allocate_to_pool(mempool_id_); });
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
  const c10::cuda::CUDAStreamGuard guard(cuda_stream(stream));
  forget_stream(cuda_stream(stream).stream());
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
  const c10::cuda::CUDAStreamGuard guard(cuda_stream(stream));
  const GeneratorSet::Lock lock(impl_->generators());
  impl_->replay();
}

cudaGraph_t Graph::native() const noexcept { return impl_->graph(); }

bool Graph::draws() const noexcept { return impl_->draws(); }

}  // namespace sidestream::cuda::libtorch
