#pragma once
#include <cstdint>
#include <string>

#include "runtime/forwarding_runtime.h"
#include "sidestream/error.h"

namespace sidestream::testing_model {

/// Fails one call that may fail on a device, once.
class FaultyRuntime final : public ForwardingRuntime {
 public:
  using ForwardingRuntime::ForwardingRuntime;

  /// The call number `n` (from 0) from here on fails; none if negative.
  void fail(std::int64_t n) {
    left_ = n;
    failed_.clear();
  }
  /// What failed since then, or empty.
  [[nodiscard]] const std::string& failed() const { return failed_; }

  OwnedStream create_stream() override { return may_fail("create_stream"), inner().create_stream(); }
  void synchronize_device() override { may_fail("synchronize_device"), inner().synchronize_device(); }
  Event create_event(EventTiming timing) override { return may_fail("create_event"), inner().create_event(timing); }
  ExternalEvent create_external_event() override {
    return may_fail("create_external_event"), inner().create_external_event();
  }
  MemoryPool create_pool() override { return may_fail("create_pool"), inner().create_pool(); }
  void record(const Event& event, c10::Stream stream) override { may_fail("record"), inner().record(event, stream); }
  void record(const ExternalEvent& event, c10::Stream stream) override {
    may_fail("record_external"), inner().record(event, stream);
  }
  void wait(c10::Stream stream, const Event& event) override { may_fail("wait"), inner().wait(stream, event); }
  void wait(c10::Stream stream, const ExternalEvent& event) override {
    may_fail("wait_external"), inner().wait(stream, event);
  }
  void copy_to_host(void* pinned, const void* device, std::size_t bytes, c10::Stream stream) override {
    may_fail("copy_to_host"), inner().copy_to_host(pinned, device, bytes, stream);
  }
  void copy_to_device(void* device, const void* pinned, std::size_t bytes, c10::Stream stream) override {
    may_fail("copy_to_device"), inner().copy_to_device(device, pinned, bytes, stream);
  }
  PinnedMemory allocate_pinned(std::size_t bytes) override {
    return may_fail("allocate_pinned"), inner().allocate_pinned(bytes);
  }
  void begin_capture(c10::Stream stream, const MemoryPool& pool, c10::ArrayRef<at::Generator> generators) override {
    may_fail("begin_capture"), inner().begin_capture(stream, pool, generators);
  }
  Graph end_capture(c10::Stream stream) override {
    if (fails("end_capture")) {
      inner().abandon_capture(stream);  // as a driver that refuses to end it
      throw DeviceError("end_capture was made to fail");
    }
    Graph graph = inner().end_capture(stream);
    may_fail("instantiate");  // the stream captures no more, and the graph is gone
    return graph;
  }
  void launch(const Graph& graph, c10::Stream stream) override { may_fail("launch"), inner().launch(graph, stream); }

 private:
  bool fails(const char* call) {
    if (left_ < 0 || left_-- > 0) {
      return false;
    }
    failed_ = call;
    return true;
  }
  void may_fail(const char* call) {
    if (fails(call)) {
      throw DeviceError(std::string(call) + " was made to fail");
    }
  }
  std::int64_t left_ = -1;
  std::string failed_;
};

}  // namespace sidestream::testing_model
