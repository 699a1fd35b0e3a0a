#include "runtime/cuda/libtorch.h"

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "runtime/cuda/error.h"
#include "runtime/named_streams.h"
#include "runtime/replayed_memory.h"

namespace sidestream::cuda::libtorch {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

c10::cuda::CUDAStream cuda_stream(c10::Stream stream) {
  return c10::cuda::CUDAStream(c10::cuda::CUDAStream::UNCHECKED, stream);
}

at::HostAllocator& host_allocator() { return *at::getHostAllocator(c10::DeviceType::CUDA); }

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
  named_streams::add(self.storage(), stream);
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

}  // namespace sidestream::cuda::libtorch
