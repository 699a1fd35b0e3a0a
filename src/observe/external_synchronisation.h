#pragma once
#include <cstddef>

#include "runtime/device_listener.h"

namespace sidestream {

class CheckedRuntime;

/// Writes into a checked runtime's journal what bypasses that runtime: streams and events of LibTorch that a model or autograd uses, what
/// the host saw of them, and freed memory that an allocator hands out again after work on other streams.
/// Threads: as DeviceListener; under the runtime's lock.
class ExternalSynchronisation final : public DeviceListener {
 public:
  explicit ExternalSynchronisation(CheckedRuntime& runtime) : runtime_(runtime) {}

  void recorded(const void* event, StreamKey stream) override;
  void waited(StreamKey stream, const void* event) override;
  void host_saw_event(const void* event) override;
  void host_saw_stream(StreamKey stream) override;
  void host_saw_device(c10::Device device) override;
  void freed_behind(StreamKey stream, const void* begin, std::size_t bytes) override;

 private:
  /// True if waits of the calling thread count as waits of the journal's host: it began the step, or its operators are observed.
  [[nodiscard]] bool hosts_this_thread() const noexcept;

  CheckedRuntime& runtime_;
};

}  // namespace sidestream
