#pragma once
#include <mutex>

#include "unit/memory/fake_runtime.h"

namespace sidestream::test {

/// A runtime without a device whose calls may come from several threads at once, as Runtime says.
class LockedRuntime final : public FakeRuntime {
 public:
  void record(const Event& event, c10::Stream stream) override {
    const std::lock_guard lock(mutex_);
    FakeRuntime::record(event, stream);
  }
  void wait(c10::Stream stream, const Event& event) override {
    const std::lock_guard lock(mutex_);
    FakeRuntime::wait(stream, event);
  }
  void synchronize(const Event& event) override {
    const std::lock_guard lock(mutex_);
    FakeRuntime::synchronize(event);
  }
  void synchronize(c10::Stream /*stream*/) override {}
  PinnedMemory allocate_pinned(std::size_t bytes) override {
    const std::lock_guard lock(mutex_);
    return FakeRuntime::allocate_pinned(bytes);
  }

 protected:
  void destroy(HandleKind kind, void* native) noexcept override {
    const std::lock_guard lock(mutex_);
    FakeRuntime::destroy(kind, native);
  }

 private:
  std::mutex mutex_;
};

}  // namespace sidestream::test
