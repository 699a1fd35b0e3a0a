#include "runtime/cuda/cuda_runtime.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>

#include "runtime/capture_turn.h"
#include "runtime/cuda/capture_mode.h"
#include "runtime/cuda/driver.h"
#include "runtime/cuda/error.h"
#include "runtime/cuda/idle_streams.h"
#include "runtime/cuda/pinned_pages.h"
#include "runtime/cuda/settings.h"
#include "runtime/host_waits.h"
#include "sidestream/error.h"

namespace sidestream::cuda {
namespace {

const char* name_of(HandleKind kind) {
  switch (kind) {
    case HandleKind::stream:
      return "stream";
    case HandleKind::event:
      return "event";
    case HandleKind::external_event:
      return "external event";
    case HandleKind::graph:
      return "graph";
    case HandleKind::pool:
      return "memory pool";
    case HandleKind::pinned:
      return "pinned memory";
  }
  return "handle";
}

// The driver's answer to any use of an event whose last record was captured, once that capture has ended, is "invalid value".
void check_event(cudaError_t status, const char* call) {
  if (status == cudaErrorInvalidValue || status == cudaErrorCapturedEvent) [[unlikely]] {
    (void)cudaGetLastError();
    throw CaptureError(std::string(call) +
                       " failed: the event was last recorded inside a capture; outside of it use an external event");
  }
  check(status, call, "event");
}

cudaEvent_t make_event(unsigned flags, const char* object) {
  const RelaxedCapture relaxed;
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, flags), "cudaEventCreateWithFlags", object);
  return event;
}

}  // namespace

CudaRuntime::CudaRuntime(c10::Device device) : device_(device), captures_(OpenCaptures::of(device)) {
  (void)libtorch::latest_refusal(device);  // begins to listen
}

CudaRuntime::~CudaRuntime() {
  for (const c10::StreamId stream : captures_.of_runtime(*this)) {
    captures_.drop(stream);
  }
  destroy_deferred();
}

void CudaRuntime::check_settings(bool graphs) const { cuda::check_settings(current_settings(), graphs); }

DeviceInfo CudaRuntime::info() const {
  cudaDeviceProp properties{};
  int driver = 0;
  int runtime = 0;
  check(cudaGetDeviceProperties(&properties, device_.index()), "cudaGetDeviceProperties", "device");
  check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion", "driver");
  check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion", "runtime");
  return {properties.name, "driver for CUDA " + version_words(driver) + ", CUDA runtime " + version_words(runtime),
          static_cast<std::int64_t>(properties.totalGlobalMem)};
}

void CudaRuntime::refuse_handle(HandleKind kind, const Runtime* owner, bool empty) const {
  if (empty || owner == nullptr) {
    throw UsageError(std::string("an empty ") + name_of(kind) + " handle was passed (reset, or moved from)");
  }
  throw UsageError(std::string("a ") + name_of(kind) + " of " + owner->device().str() +
                   " was passed to the runtime of " + device_.str());
}

void CudaRuntime::refuse_stream(c10::Stream stream) const {
  throw UsageError("a stream of " + stream.device().str() + " was passed to the runtime of " + device_.str());
}

cudaStream_t CudaRuntime::native(c10::Stream stream) const {
  if (stream.device() != device_) [[unlikely]] {
    refuse_stream(stream);
  }
  return libtorch::native_stream(stream);
}

c10::Stream CudaRuntime::current_stream() const { return libtorch::current_stream(device_); }

void CudaRuntime::set_current_stream(c10::Stream stream) {
  (void)native(stream);
  libtorch::set_current_stream(stream);
}

OwnedStream CudaRuntime::create_stream() {
  const CurrentDevice current(device_);
  const RelaxedCapture relaxed;
  cudaStream_t stream = IdleStreams::of(device_).take();
  return {Handle<HandleKind::stream>(*this, stream), libtorch::wrap_stream(stream, device_)};
}

void CudaRuntime::synchronize(c10::Stream stream) {
  const OwnWaits own;
  const OnItsDevice on_device(native(stream), device_);
  check(cudaStreamSynchronize(native(stream)), "cudaStreamSynchronize", "stream");
}

void CudaRuntime::synchronize_device() {
  CaptureTurn::let_others_finish(device_, "the device is synchronized");
  const OwnWaits own;
  const CurrentDevice current(device_);
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize", "device");
}

Event CudaRuntime::create_event(EventTiming timing) {
  const CurrentDevice current(device_);
  return {*this, make_event(timing == EventTiming::on ? cudaEventDefault : cudaEventDisableTiming, "event")};
}

void CudaRuntime::record(const Event& event, c10::Stream stream) {
  const OnItsDevice on_device(native(stream), device_);
  check(cudaEventRecord(static_cast<cudaEvent_t>(native(event)), native(stream)), "cudaEventRecord", "event");
}

void CudaRuntime::wait(c10::Stream stream, const Event& event) {
  const OnItsDevice on_device(native(stream), device_);
  check_event(cudaStreamWaitEvent(native(stream), static_cast<cudaEvent_t>(native(event)), cudaEventWaitDefault),
              "cudaStreamWaitEvent");
}

void CudaRuntime::synchronize(const Event& event) {
  const OwnWaits own;
  check_event(cudaEventSynchronize(static_cast<cudaEvent_t>(native(event))), "cudaEventSynchronize");
}

double CudaRuntime::elapsed_ms(const Event& begin, const Event& end) {
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(native(begin)),
                             static_cast<cudaEvent_t>(native(end))),
        "cudaEventElapsedTime", "event");
  return static_cast<double>(milliseconds);
}

ExternalEvent CudaRuntime::create_external_event() {
  const CurrentDevice current(device_);
  return {*this, make_event(cudaEventDisableTiming, "external event")};
}

// The driver takes the external flags only while the stream captures.
void CudaRuntime::record(const ExternalEvent& event, c10::Stream stream) {
  auto* const queue = native(stream);
  const OnItsDevice on_device(queue, device_);
  const unsigned flags = capturing(queue) ? cudaEventRecordExternal : cudaEventRecordDefault;
  check(cudaEventRecordWithFlags(static_cast<cudaEvent_t>(native(event)), queue, flags), "cudaEventRecordWithFlags",
        "external event");
}

void CudaRuntime::wait(c10::Stream stream, const ExternalEvent& event) {
  auto* const queue = native(stream);
  const OnItsDevice on_device(queue, device_);
  const unsigned flags = capturing(queue) ? cudaEventWaitExternal : cudaEventWaitDefault;
  check(cudaStreamWaitEvent(queue, static_cast<cudaEvent_t>(native(event)), flags), "cudaStreamWaitEvent",
        "external event");
}

void CudaRuntime::copy_to_host(void* pinned, const void* device, std::size_t bytes, c10::Stream stream) {
  const OnItsDevice on_device(native(stream), device_);
  check(cudaMemcpyAsync(pinned, device, bytes, cudaMemcpyDeviceToHost, native(stream)), "cudaMemcpyAsync",
        "copy to host");
}

void CudaRuntime::copy_to_device(void* device, const void* pinned, std::size_t bytes, c10::Stream stream) {
  const OnItsDevice on_device(native(stream), device_);
  check(cudaMemcpyAsync(device, pinned, bytes, cudaMemcpyHostToDevice, native(stream)), "cudaMemcpyAsync",
        "copy to device");
}

MemoryStats CudaRuntime::memory_stats() const {
  MemoryStats stats = libtorch::memory_stats(device_);
  stats.refusals += graphs_refused_.load(std::memory_order_relaxed);
  return stats;
}

DeviceRoom CudaRuntime::room() const {
  const CurrentDevice current(device_);
  const RelaxedCapture relaxed;
  std::size_t free = 0;
  std::size_t total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo", "device");
  const auto left = static_cast<std::int64_t>(free);
  const auto all = static_cast<std::int64_t>(total);
  const std::int64_t reserved = libtorch::memory_stats(device_).reserved;
  return {std::clamp<std::int64_t>(libtorch::allocator_limit(device_, all) - reserved, 0, left), all - left - reserved};
}

MemoryRefusal CudaRuntime::latest_refusal() const {
  const MemoryStats stats = libtorch::memory_stats(device_);
  return stats.refusals == refused_behind_.load() ? MemoryRefusal{0, stats.reserved, room().free}
                                                  : libtorch::latest_refusal(device_);
}

void CudaRuntime::reset_peak_memory_stats() { libtorch::reset_peak_memory_stats(device_); }

void CudaRuntime::release_cached_memory() {
  forbid_while_capturing("release_cached_memory");
  CaptureTurn::let_others_finish(device_, "cached memory is released");
  const OwnWaits own;
  libtorch::release_cached_memory();
}

void CudaRuntime::forget_workspaces(c10::Stream stream) noexcept {
  libtorch::forget_stream(libtorch::native_stream(stream));
}

MemoryPool CudaRuntime::create_pool() { return {*this, new libtorch::PoolId(libtorch::create_pool(device_))}; }

std::int64_t CudaRuntime::allocated_in(const MemoryPool& pool) const {
  return libtorch::allocated_in(*static_cast<const libtorch::PoolId*>(pool.native()));
}

PinnedMemory CudaRuntime::allocate_pinned(std::size_t bytes) {
  forbid_while_capturing("allocate_pinned");
  if (bytes == 0) {
    return {};
  }
  const OwnWaits own;
  const CurrentDevice current(device_);
  std::byte* const data = pin(bytes);
  return {Handle<HandleKind::pinned>(*this, data), data, bytes};
}

void CudaRuntime::destroy(HandleKind kind, void* native) noexcept {
  const bool deferrable = kind == HandleKind::graph || kind == HandleKind::stream || kind == HandleKind::pinned;
  if (!deferrable || !captures_.any() || !captures_.defer(kind, native)) {
    destroy_now(kind, native);
  }
}

void CudaRuntime::destroy_now(HandleKind kind, void* native) noexcept {
  const OwnWaits own;
  const RelaxedCapture relaxed;
  switch (kind) {
    case HandleKind::stream:
      libtorch::forget_stream(static_cast<cudaStream_t>(native));
      IdleStreams::of(device_).give_back(static_cast<cudaStream_t>(native));
      break;
    case HandleKind::event:
    case HandleKind::external_event:
      report(cudaEventDestroy(static_cast<cudaEvent_t>(native)), "cudaEventDestroy", name_of(kind));
      break;
    case HandleKind::graph:
      delete static_cast<libtorch::Graph*>(native);
      break;
    case HandleKind::pool: {
      const std::unique_ptr<libtorch::PoolId> pool(static_cast<libtorch::PoolId*>(native));
      libtorch::release_pool(device_, *pool);
      break;
    }
    case HandleKind::pinned:
      unpin_settled(native);
      break;
  }
}

// Copies may be on their way still, and what was registered is not waited for by the driver.
void CudaRuntime::unpin_settled(void* native) noexcept {
  try {
    const CurrentDevice current(device_);
    report(cudaDeviceSynchronize(), "cudaDeviceSynchronize", "pinned memory");
    report(unpin(native), "unpinning", "pinned memory");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sidestream: pinned memory was not freed; the system frees it when the process ends: %s\n",
                 error.what());
  }
}

void CudaRuntime::destroy_deferred() noexcept {
  for (const auto& [kind, native] : captures_.take_deferred()) {
    destroy_now(kind, native);
  }
}

}  // namespace sidestream::cuda
