#pragma once
#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include <cuda_runtime_api.h>

#include "runtime/cuda/libtorch_graph.h"
#include "runtime/cuda/open_captures.h"
#include "runtime/runtime.h"

namespace sidestream::cuda {

/// Runtime on one NVIDIA GPU: streams and events of our own, LibTorch's caching allocator and graphs.
class CudaRuntime final : public Runtime {
 public:
  explicit CudaRuntime(c10::Device device);
  ~CudaRuntime() override;

  [[nodiscard]] c10::Device device() const noexcept override { return device_; }
  [[nodiscard]] DeviceInfo info() const override;
  void check_settings(bool graphs) const override;

  [[nodiscard]] c10::Stream current_stream() const override;
  void set_current_stream(c10::Stream stream) override;
  [[nodiscard]] OwnedStream create_stream() override;
  void synchronize(c10::Stream stream) override;
  void synchronize_device() override;

  [[nodiscard]] Event create_event(EventTiming timing) override;
  void record(const Event& event, c10::Stream stream) override;
  void wait(c10::Stream stream, const Event& event) override;
  void synchronize(const Event& event) override;
  [[nodiscard]] bool keeps_time() const noexcept override { return true; }
  [[nodiscard]] double elapsed_ms(const Event& begin, const Event& end) override;
  [[nodiscard]] ExternalEvent create_external_event() override;
  void record(const ExternalEvent& event, c10::Stream stream) override;
  void wait(c10::Stream stream, const ExternalEvent& event) override;

  void copy_to_host(void* pinned, const void* device, std::size_t bytes, c10::Stream stream) override;
  void copy_to_device(void* device, const void* pinned, std::size_t bytes, c10::Stream stream) override;

  [[nodiscard]] MemoryStats memory_stats() const override;
  void reset_peak_memory_stats() override;
  [[nodiscard]] DeviceRoom room() const override;
  [[nodiscard]] MemoryRefusal latest_refusal() const override;
  void release_cached_memory() override;
  void forget_workspaces(c10::Stream stream) noexcept override;
  [[nodiscard]] MemoryPool create_pool() override;
  [[nodiscard]] std::int64_t allocated_in(const MemoryPool& pool) const override;
  [[nodiscard]] PinnedMemory allocate_pinned(std::size_t bytes) override;

  void begin_capture(c10::Stream stream, const MemoryPool& pool, c10::ArrayRef<at::Generator> generators) override;
  [[nodiscard]] Graph end_capture(c10::Stream stream) override;
  void abandon_capture(c10::Stream stream) noexcept override;
  [[nodiscard]] CaptureStatus capture_status(c10::Stream stream) const override;
  void launch(const Graph& graph, c10::Stream stream) override;
  [[nodiscard]] bool draws(const Graph& graph) const override;
  [[nodiscard]] std::vector<GraphNode> nodes(const Graph& graph) const override;
  [[nodiscard]] std::size_t captured_nodes(c10::Stream stream) const override;

 protected:
  void destroy(HandleKind kind, void* native) noexcept override;

 private:
  [[nodiscard]] cudaStream_t native(c10::Stream stream) const;
  template <HandleKind kind>
  [[nodiscard]] void* native(const Handle<kind>& handle) const;
  [[noreturn]] void refuse_handle(HandleKind kind, const Runtime* owner, bool empty) const;
  [[noreturn]] void refuse_stream(c10::Stream stream) const;

  [[nodiscard]] bool capturing(cudaStream_t stream) const;
  /// Throws CaptureError, and invalidates the captures that the calling thread began, if there are any.
  void forbid_while_capturing(const char* what);
  /// Throws: DeviceError with the bytes when it does not fit, also with no cached memory left.
  void instantiate(libtorch::Graph& graph, c10::Stream stream);
  void destroy_now(HandleKind kind, void* native) noexcept;
  void destroy_deferred() noexcept;
  void unpin_settled(void* native) noexcept;

  c10::Device device_;
  OpenCaptures& captures_;
  // Graphs for which the device had no memory besides their tensors: the allocator does not know of them.
  std::atomic<std::int64_t> graphs_refused_{0};
  std::atomic<std::int64_t> refused_behind_{-1};  ///< the latest: how many requests the allocator had refused by then
};

template <HandleKind kind>
void* CudaRuntime::native(const Handle<kind>& handle) const {
  const bool ours = handle.runtime() == this || (handle.runtime() != nullptr && handle.runtime()->device() == device_);
  if (!ours || !handle) [[unlikely]] {
    refuse_handle(kind, handle.runtime(), !handle);
  }
  return handle.native();
}

/// Makes a device current for the calling thread for its lifetime. The way back makes no context on a device that has none.
class [[nodiscard]] CurrentDevice {
 public:
  explicit CurrentDevice(c10::Device device)
      : before_(libtorch::exchange_device(device.index())), current_(device.index()) {}
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() {
    if (before_ != current_) {
      libtorch::return_to_device(before_);
    }
  }

 private:
  c10::DeviceIndex before_;
  c10::DeviceIndex current_;
};

/// To the driver the null stream is the current device's: makes `device` current where `stream` is null.
class [[nodiscard]] OnItsDevice {
 public:
  OnItsDevice(cudaStream_t stream, c10::Device device) {
    if (stream == nullptr) {
      current_.emplace(device);
    }
  }

 private:
  std::optional<CurrentDevice> current_;
};

}  // namespace sidestream::cuda
