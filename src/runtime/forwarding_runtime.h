#pragma once
#include <memory>
#include <utility>

#include "runtime/runtime.h"

namespace sidestream {

/// Passes every call on: what decorators start from. Handles are the inner runtime's own.
class ForwardingRuntime : public Runtime {
 public:
  explicit ForwardingRuntime(std::shared_ptr<Runtime> inner) : inner_(std::move(inner)) {}

  [[nodiscard]] c10::Device device() const noexcept override { return inner_->device(); }
  [[nodiscard]] DeviceInfo info() const override { return inner_->info(); }
  [[nodiscard]] std::int64_t live_handles() const noexcept override { return inner_->live_handles(); }
  void check_settings(bool graphs) const override { inner_->check_settings(graphs); }
  [[nodiscard]] c10::Stream current_stream() const override { return inner_->current_stream(); }
  void set_current_stream(c10::Stream stream) override { inner_->set_current_stream(stream); }
  [[nodiscard]] OwnedStream create_stream() override { return inner_->create_stream(); }
  void synchronize(c10::Stream stream) override { inner_->synchronize(stream); }
  void synchronize_device() override { inner_->synchronize_device(); }
  [[nodiscard]] Event create_event(EventTiming timing) override { return inner_->create_event(timing); }
  void record(const Event& event, c10::Stream stream) override { inner_->record(event, stream); }
  void wait(c10::Stream stream, const Event& event) override { inner_->wait(stream, event); }
  void synchronize(const Event& event) override { inner_->synchronize(event); }
  [[nodiscard]] bool keeps_time() const noexcept override { return inner_->keeps_time(); }
  [[nodiscard]] double elapsed_ms(const Event& begin, const Event& end) override {
    return inner_->elapsed_ms(begin, end);
  }
  [[nodiscard]] ExternalEvent create_external_event() override { return inner_->create_external_event(); }
  void record(const ExternalEvent& event, c10::Stream stream) override { inner_->record(event, stream); }
  void wait(c10::Stream stream, const ExternalEvent& event) override { inner_->wait(stream, event); }
  void copy_to_host(void* pinned, const void* device, std::size_t bytes, c10::Stream stream) override {
    inner_->copy_to_host(pinned, device, bytes, stream);
  }
  void copy_to_device(void* device, const void* pinned, std::size_t bytes, c10::Stream stream) override {
    inner_->copy_to_device(device, pinned, bytes, stream);
  }
  [[nodiscard]] MemoryStats memory_stats() const override { return inner_->memory_stats(); }
  void reset_peak_memory_stats() override { inner_->reset_peak_memory_stats(); }
  [[nodiscard]] DeviceRoom room() const override { return inner_->room(); }
  [[nodiscard]] MemoryRefusal latest_refusal() const override { return inner_->latest_refusal(); }
  void release_cached_memory() override { inner_->release_cached_memory(); }
  void forget_workspaces(c10::Stream stream) noexcept override { inner_->forget_workspaces(stream); }
  [[nodiscard]] MemoryPool create_pool() override { return inner_->create_pool(); }
  [[nodiscard]] std::int64_t allocated_in(const MemoryPool& pool) const override { return inner_->allocated_in(pool); }
  [[nodiscard]] PinnedMemory allocate_pinned(std::size_t bytes) override { return inner_->allocate_pinned(bytes); }
  void begin_capture(c10::Stream stream, const MemoryPool& pool, c10::ArrayRef<at::Generator> generators) override {
    inner_->begin_capture(stream, pool, generators);
  }
  [[nodiscard]] Graph end_capture(c10::Stream stream) override { return inner_->end_capture(stream); }
  void abandon_capture(c10::Stream stream) noexcept override { inner_->abandon_capture(stream); }
  [[nodiscard]] CaptureStatus capture_status(c10::Stream stream) const override {
    return inner_->capture_status(stream);
  }
  void launch(const Graph& graph, c10::Stream stream) override { inner_->launch(graph, stream); }
  [[nodiscard]] bool draws(const Graph& graph) const override { return inner_->draws(graph); }
  [[nodiscard]] std::vector<GraphNode> nodes(const Graph& graph) const override { return inner_->nodes(graph); }
  [[nodiscard]] std::size_t captured_nodes(c10::Stream stream) const override { return inner_->captured_nodes(stream); }

 protected:
  [[nodiscard]] Runtime& inner() const noexcept { return *inner_; }
  void destroy(HandleKind /*kind*/, void* /*native*/) noexcept override {}  // handles are the inner runtime's

 private:
  std::shared_ptr<Runtime> inner_;
};

}  // namespace sidestream
