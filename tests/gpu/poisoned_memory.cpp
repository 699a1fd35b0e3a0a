#include "gpu/poisoned_memory.h"

#include <atomic>
#include <mutex>
#include <string_view>
#include <utility>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "base/site.h"
#include "graphs/outputs/storage_holders.h"
#include "poisoned_slots.h"

namespace sidestream::gpu {
namespace {

using c10::CachingDeviceAllocator::TraceEntry;

/// Where the calling thread issues work.
bool in_phase(std::string_view phase) {
  const Site* site = Site::innermost();
  return site != nullptr && site->phase() == phase;
}

/// The allocator keeps its trackers for good: one is attached, once, and does nothing while no PoisonedMemory lives.
struct Tracker {
  std::atomic<bool> on{false};
  std::mutex mutex;
  bool capturing = false;
  void* captured_stream = nullptr;  ///< where a fill may become a node now; null: nowhere
  std::atomic<std::int64_t> filled{0};
  std::atomic<std::int64_t> captured{0};
  std::atomic<std::int64_t> failures{0};

  /// Called under the allocator's lock: the driver only, no call of LibTorch.
  void see(const TraceEntry& entry) {
    if (!on || (entry.action_ != TraceEntry::ALLOC && entry.action_ != TraceEntry::FREE_COMPLETED)) {
      return;
    }
    // Held over the fill: autograd's device thread gives memory back when it likes, and no node may come after `set`.
    const std::lock_guard lock(mutex);
    const bool in_pool = entry.mempool_.first != 0 || entry.mempool_.second != 0;
    // What a warm-up left on this stream is no memory of the graph, and may belong to something else when the graph runs.
    const bool in_graph = in_pool && entry.stream_ != nullptr && entry.stream_ == captured_stream;
    if (in_graph && in_phase("reload")) {
      return;  // copies beside the graph write it, and may have done so when a fill in the graph runs
    }
    if (!in_graph && (in_pool || capturing)) {
      return;
    }
    int before = 0;  // the default stream is the current device's
    (void)cudaGetDevice(&before);
    (void)cudaSetDevice(entry.device_);
    const auto status = cudaMemsetAsync(reinterpret_cast<void*>(entry.addr_), testing_model::kPoisonByte, entry.size_,
                                        static_cast<cudaStream_t>(entry.stream_));
    (void)cudaSetDevice(before);
    if (status != cudaSuccess) {
      (void)cudaGetLastError();
      ++failures;
      return;
    }
    ++(in_graph ? captured : filled);
  }
  void set(bool now_capturing, void* stream) {
    const std::lock_guard lock(mutex);
    capturing = now_capturing;
    captured_stream = stream;
  }
};

Tracker& tracker() {
  static Tracker tracker;
  return tracker;
}

}  // namespace

PoisonedMemory::PoisonedMemory(std::shared_ptr<Runtime> cuda) : ForwardingRuntime(std::move(cuda)) {
  static std::once_flag attached;
  std::call_once(attached, [] {
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const TraceEntry& entry) { tracker().see(entry); });
  });
  tracker().filled = tracker().captured = tracker().failures = 0;
  tracker().on = true;
}

PoisonedMemory::~PoisonedMemory() { tracker().on = false; }

void PoisonedMemory::begin_capture(c10::Stream stream, const MemoryPool& pool,
                                   c10::ArrayRef<at::Generator> generators) {
  // Autograd's thread frees the last tensors of a backward some time after the backward has returned. In the next capture, a fill of
  // that memory could run while a copy beside the graph already writes it again.
  await_end_of_backward(device());
  tracker().set(true, nullptr);
  try {
    inner().begin_capture(stream, pool, generators);
  } catch (...) {
    tracker().set(false, nullptr);
    throw;
  }
  tracker().set(true, c10::cuda::CUDAStream(stream).stream());
}

// An external record of a capture, but for those of its groups, says that its compute is done: a fill behind it would be compute
// that nobody awaits.
void PoisonedMemory::record(const ExternalEvent& event, c10::Stream stream) {
  if (capture_status(stream) != CaptureStatus::none && !in_phase("offload")) {
    tracker().set(true, nullptr);
  }
  inner().record(event, stream);
}

Graph PoisonedMemory::end_capture(c10::Stream stream) {
  tracker().set(true, nullptr);
  try {
    Graph graph = inner().end_capture(stream);
    tracker().set(false, nullptr);
    return graph;
  } catch (...) {
    tracker().set(false, nullptr);
    throw;
  }
}

void PoisonedMemory::abandon_capture(c10::Stream stream) noexcept {
  tracker().set(true, nullptr);
  inner().abandon_capture(stream);
  tracker().set(false, nullptr);
}

std::int64_t PoisonedMemory::count() const noexcept { return tracker().filled; }
std::int64_t PoisonedMemory::captured_count() const noexcept { return tracker().captured; }
std::int64_t PoisonedMemory::failures() const noexcept { return tracker().failures; }

}  // namespace sidestream::gpu
