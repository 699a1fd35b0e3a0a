#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

#include <c10/core/Stream.h>

namespace sidestream {

class Runtime;

/// What a native object is; an owner passes it to Runtime::destroy.
enum class HandleKind : std::uint8_t { stream, event, external_event, graph, pool, pinned };

/// Owns one native object of a Runtime and destroys it at the end of its life. Move-only; empty after a move.
/// Ordering: destruction waits for nothing; see each maker in runtime.h for what must be finished before.
/// Capture: destruction is legal while any stream captures (the backend defers what the driver forbids).
/// Threads: any, one at a time. Throws: never; a failure at tear-down is reported on stderr.
template <HandleKind kind>
class Handle {
 public:
  Handle() = default;
  Handle(Runtime& runtime, void* native) noexcept;
  Handle(Handle&& other) noexcept : runtime_(other.runtime_), native_(std::exchange(other.native_, nullptr)) {}
  Handle& operator=(Handle&& other) noexcept {
    if (this != &other) {
      reset();
      runtime_ = other.runtime_;
      native_ = std::exchange(other.native_, nullptr);
    }
    return *this;
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() { reset(); }

  void reset() noexcept;
  [[nodiscard]] explicit operator bool() const noexcept { return native_ != nullptr; }
  [[nodiscard]] void* native() const noexcept { return native_; }
  [[nodiscard]] Runtime* runtime() const noexcept { return runtime_; }

 private:
  Runtime* runtime_ = nullptr;
  void* native_ = nullptr;
};

/// Orders work between streams (and within one capture). Never waited on from outside the capture that recorded it.
using Event = Handle<HandleKind::event>;
/// Recorded by a node inside a graph, waited on from outside. A type of its own, never pooled with ordinary events.
using ExternalEvent = Handle<HandleKind::external_event>;
/// An instantiated graph: owns the executable; holds its memory pool until it is destroyed or reset.
using Graph = Handle<HandleKind::graph>;
/// A private device memory pool, shared by the captures that name it; its memory lives until the pool and the last graph die.
using MemoryPool = Handle<HandleKind::pool>;

/// A stream of our own (not from LibTorch's shared pool).
class OwnedStream {
 public:
  OwnedStream(Handle<HandleKind::stream> handle, c10::Stream stream) noexcept
      : handle_(std::move(handle)), stream_(stream) {}
  [[nodiscard]] c10::Stream get() const noexcept { return stream_; }
  operator c10::Stream() const noexcept { return stream_; }  // NOLINT: a reference to what is owned

 private:
  Handle<HandleKind::stream> handle_;
  c10::Stream stream_;
};

/// Page-locked host memory, exact bytes, 4096-byte aligned at least.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  PinnedMemory(Handle<HandleKind::pinned> handle, std::byte* data, std::size_t bytes) noexcept
      : handle_(std::move(handle)), data_(data), bytes_(bytes) {}
  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

 private:
  Handle<HandleKind::pinned> handle_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace sidestream
