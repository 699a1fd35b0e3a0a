#pragma once
#include <vector>

#include "runtime/runtime.h"
#include "sim/device/device.h"

namespace sidestream::sim {

/// The sim device through the Runtime interface. All of them in a process share the one device: its memory, its streams, and what Device
/// offers beyond the interface (schedule, strict mode, limits).
class SimRuntime final : public Runtime {
 public:
  SimRuntime() : device_(Device::get()) {}

  c10::Device device() const noexcept override;
  DeviceInfo info() const override;

  c10::Stream current_stream() const override;
  void set_current_stream(c10::Stream stream) override;
  OwnedStream create_stream() override;
  void synchronize(c10::Stream stream) override;
  void synchronize_device() override;

  Event create_event(EventTiming timing) override;
  void record(const Event& event, c10::Stream stream) override;
  void wait(c10::Stream stream, const Event& event) override;
  void synchronize(const Event& event) override;
  double elapsed_ms(const Event& begin, const Event& end) override;
  ExternalEvent create_external_event() override;
  void record(const ExternalEvent& event, c10::Stream stream) override;
  void wait(c10::Stream stream, const ExternalEvent& event) override;

  void copy_to_host(void* pinned, const void* device, std::size_t bytes, c10::Stream stream) override;
  void copy_to_device(void* device, const void* pinned, std::size_t bytes, c10::Stream stream) override;

  MemoryStats memory_stats() const override;
  void reset_peak_memory_stats() override;
  [[nodiscard]] DeviceRoom room() const override;
  [[nodiscard]] MemoryRefusal latest_refusal() const override;
  void release_cached_memory() override;
  MemoryPool create_pool() override;
  std::int64_t allocated_in(const MemoryPool& pool) const override;
  PinnedMemory allocate_pinned(std::size_t bytes) override;

  void begin_capture(c10::Stream stream, const MemoryPool& pool, c10::ArrayRef<at::Generator> generators) override;
  Graph end_capture(c10::Stream stream) override;
  void abandon_capture(c10::Stream stream) noexcept override;
  CaptureStatus capture_status(c10::Stream stream) const override;
  void launch(const Graph& graph, c10::Stream stream) override;
  bool draws(const Graph& graph) const override;
  std::vector<GraphNode> nodes(const Graph& graph) const override;
  std::size_t captured_nodes(c10::Stream stream) const override;

 protected:
  void destroy(HandleKind kind, void* native) noexcept override;

 private:
  Device& device_;
};

}  // namespace sidestream::sim
