#pragma once
#include <cstdlib>
#include <vector>

#include "runtime/runtime.h"
#include "sidestream/error.h"

namespace sidestream::test {

/// Runtime for host-side tests: no device, no work; pinned memory is plain memory and every event call is logged.
class FakeRuntime : public Runtime {
 public:
  struct Call {
    enum class Kind { record, wait, record_external, wait_external, synchronize };
    Kind kind;
    const void* event = nullptr;
    c10::StreamId stream = 0;
  };

  std::vector<Call> calls;
  std::vector<std::size_t> pinned_sizes;
  std::size_t pinned_live = 0;
  std::size_t pin_limit = SIZE_MAX;
  bool capturing = false;

  static c10::Stream stream(c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CPU), id);
  }
  [[nodiscard]] std::size_t count(Call::Kind kind) const {
    std::size_t n = 0;
    for (const Call& call : calls) {
      n += call.kind == kind ? 1 : 0;
    }
    return n;
  }

  c10::Device device() const noexcept override { return c10::Device(c10::DeviceType::CPU); }
  DeviceInfo info() const override { return {}; }
  c10::Stream current_stream() const override { return stream(0); }
  void set_current_stream(c10::Stream) override {}
  OwnedStream create_stream() override { return OwnedStream({}, stream(++next_)); }
  void synchronize(c10::Stream) override {}
  void synchronize_device() override {}
  Event create_event(EventTiming) override { return Event(*this, std::malloc(1)); }
  void record(const Event& event, c10::Stream s) override { log(Call::Kind::record, event.native(), s.id()); }
  void wait(c10::Stream s, const Event& event) override { log(Call::Kind::wait, event.native(), s.id()); }
  void synchronize(const Event& event) override { log(Call::Kind::synchronize, event.native(), 0); }
  double elapsed_ms(const Event&, const Event&) override { return 0; }
  ExternalEvent create_external_event() override { return ExternalEvent(*this, std::malloc(1)); }
  void record(const ExternalEvent& event, c10::Stream s) override {
    log(Call::Kind::record_external, event.native(), s.id());
  }
  void wait(c10::Stream s, const ExternalEvent& event) override {
    log(Call::Kind::wait_external, event.native(), s.id());
  }
  void copy_to_host(void*, const void*, std::size_t, c10::Stream) override {}
  void copy_to_device(void*, const void*, std::size_t, c10::Stream) override {}
  MemoryStats memory_stats() const override { return {}; }
  void reset_peak_memory_stats() override {}
  [[nodiscard]] DeviceRoom room() const override { return {}; }
  [[nodiscard]] MemoryRefusal latest_refusal() const override { return {}; }
  void release_cached_memory() override {}
  MemoryPool create_pool() override { return {}; }
  std::int64_t allocated_in(const MemoryPool&) const override { return 0; }
  PinnedMemory allocate_pinned(std::size_t bytes) override {
    if (bytes > pin_limit) {
      throw DeviceError("pinned host memory is exhausted");
    }
    pinned_sizes.push_back(bytes);
    pinned_live += 1;
    void* memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    return PinnedMemory(Handle<HandleKind::pinned>(*this, memory), static_cast<std::byte*>(memory), bytes);
  }
  void begin_capture(c10::Stream, const MemoryPool&, c10::ArrayRef<at::Generator>) override {}
  Graph end_capture(c10::Stream) override { return {}; }
  void abandon_capture(c10::Stream) noexcept override {}
  CaptureStatus capture_status(c10::Stream) const override {
    return capturing ? CaptureStatus::active : CaptureStatus::none;
  }
  void launch(const Graph&, c10::Stream) override {}
  bool draws(const Graph&) const override { return false; }
  std::vector<GraphNode> nodes(const Graph&) const override { return {}; }
  std::size_t captured_nodes(c10::Stream) const override { return 0; }

 protected:
  void destroy(HandleKind kind, void* native) noexcept override {
    pinned_live -= kind == HandleKind::pinned ? 1 : 0;
    std::free(native);
  }

 private:
  void log(Call::Kind kind, const void* event, c10::StreamId id) { calls.push_back({kind, event, id}); }
  c10::StreamId next_ = 100;
};

}  // namespace sidestream::test
