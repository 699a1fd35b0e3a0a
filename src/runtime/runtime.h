#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>

#include "runtime/graph_node.h"
#include "runtime/handles.h"

#include "sidestream/detail/export.h"

namespace sidestream {

enum class CaptureStatus : std::uint8_t { none, active, invalidated };
enum class EventTiming : std::uint8_t { off, on };

/// Bytes. `allocated` counts live tensors, `reserved` what the allocator holds of the device, private pools included.
struct MemoryStats {
  std::int64_t allocated = 0;
  std::int64_t allocated_peak = 0;
  std::int64_t reserved = 0;
  std::int64_t reserved_peak = 0;
  std::int64_t refusals = 0;  ///< requests that found no memory, since the process began
};

/// What there is of the whole device at one moment. Bytes.
struct DeviceRoom {
  std::int64_t free = 0;  ///< may still be taken from it; where the allocator has a limit, up to that
  std::int64_t outside =
      0;  ///< in use, and not the allocator's: graph executables, libraries, contexts, other processes
};

/// A request for which the allocator found no memory, after it had freed all that it could. Bytes; `asked` is 0 if the size of the
/// request is unknown.
struct MemoryRefusal {
  std::int64_t asked = 0;
  std::int64_t reserved = 0;  ///< by the allocator then
  std::int64_t free = 0;      ///< of the device then
};

/// What `sidestream info` and error messages show.
struct DeviceInfo {
  std::string name;
  std::string driver;  ///< driver and runtime versions in words
  std::int64_t memory_bytes = 0;
};

/// The device under the engine. Backends implement it and register themselves (backend.h); decorators wrap any.
///
/// Streams are `c10::Stream` because autograd sets them; work of LibTorch's operators goes to the current stream.
/// Every method throws UsageError if a handle or stream of another backend is passed, and DeviceError if the device refuses. It throws
/// CaptureError if a rule of capture is broken; the capture is then invalid until it is ended.
/// Threads: any thread; one capture per stream; a capture is begun and ended by one thread.
class SIDESTREAM_API Runtime {
 public:
  Runtime() = default;
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;
  virtual ~Runtime() = default;

  [[nodiscard]] virtual c10::Device device() const noexcept = 0;
  [[nodiscard]] virtual DeviceInfo info() const = 0;
  /// Handles that this runtime made and that still own something, of all kinds. What tests' invariants count.
  [[nodiscard]] virtual std::int64_t live_handles() const noexcept { return live_handles_; }
  /// Throws: UsageError if this process's settings (allocator, environment) rule out an engine, or, with `graphs`, graphs that
  /// share their memory; it names the setting and what to set instead.
  virtual void check_settings([[maybe_unused]] bool graphs) const {}

  // --- streams -------------------------------------------------------------------------------------------------

  /// The calling thread's current stream on this device.
  [[nodiscard]] virtual c10::Stream current_stream() const = 0;
  /// Makes `stream` the calling thread's current stream. Prefer StreamGuard.
  virtual void set_current_stream(c10::Stream stream) = 0;
  /// A new stream; it must be idle when its owner dies. Capture: legal.
  [[nodiscard]] virtual OwnedStream create_stream() = 0;
  /// Blocks the host until all work queued on `stream` is done. Capture: illegal while the calling thread captures, whatever
  /// the stream.
  virtual void synchronize(c10::Stream stream) = 0;
  /// Blocks the host until the device is idle. Capture: illegal while the calling thread captures; where another thread has the
  /// device's CaptureTurn, waits for its end first (it would invalidate that capture). Throws: as CaptureTurn.
  virtual void synchronize_device() = 0;

  // --- events --------------------------------------------------------------------------------------------------

  [[nodiscard]] virtual Event create_event(EventTiming timing = EventTiming::off) = 0;
  /// Marks the work queued on `stream` so far; a later record replaces it. Capture: legal, the mark is then internal to it.
  virtual void record(const Event& event, c10::Stream stream) = 0;
  /// Later work on `stream` waits for the mark current at this call. A never recorded event is a no-op on CUDA; the sim
  /// device journals it and throws in strict mode. Capture: legal for an event recorded in the same capture (a `stream` that
  /// was not capturing then joins it); an event from outside it is an isolation error.
  virtual void wait(c10::Stream stream, const Event& event) = 0;
  virtual void synchronize(const Event& event) = 0;
  /// True if timing events, and how long copies take, tell of a device's own clock and link.
  [[nodiscard]] virtual bool keeps_time() const noexcept { return false; }
  /// Milliseconds between two recorded timing events that are both done.
  [[nodiscard]] virtual double elapsed_ms(const Event& begin, const Event& end) = 0;

  [[nodiscard]] virtual ExternalEvent create_external_event() = 0;
  /// Capturing: adds an event-record node to the graph (each launch of the graph then records it). Else: records it now.
  virtual void record(const ExternalEvent& event, c10::Stream stream) = 0;
  /// Not capturing: later work on `stream` waits for the latest record or launch. Capturing: adds an event-wait node.
  virtual void wait(c10::Stream stream, const ExternalEvent& event) = 0;

  // --- copies --------------------------------------------------------------------------------------------------

  /// Asynchronous device-to-host copy of `bytes` bytes on `stream`; `pinned` must lie in pinned memory. Capture: legal.
  virtual void copy_to_host(void* pinned, const void* device, std::size_t bytes, c10::Stream stream) = 0;
  /// Asynchronous host-to-device copy of `bytes` bytes on `stream`; `pinned` must lie in pinned memory. Capture: legal.
  virtual void copy_to_device(void* device, const void* pinned, std::size_t bytes, c10::Stream stream) = 0;

  // --- memory --------------------------------------------------------------------------------------------------

  [[nodiscard]] virtual MemoryStats memory_stats() const = 0;
  virtual void reset_peak_memory_stats() = 0;
  /// Asks the driver: not for the replay path. Capture: legal.
  [[nodiscard]] virtual DeviceRoom room() const = 0;
  /// The latest of `memory_stats().refusals`.
  [[nodiscard]] virtual MemoryRefusal latest_refusal() const = 0;
  /// Gives cached, unused device memory back. Capture: illegal while the calling thread captures; waits as synchronize_device.
  virtual void release_cached_memory() = 0;
  /// Returns the memory that libraries keep to work on `stream` (cuBLAS's workspaces) to the allocator, after the stream's work. The next
  /// work there allocates again. Capture: illegal if `stream` captures.
  virtual void forget_workspaces([[maybe_unused]] c10::Stream stream) noexcept {}
  [[nodiscard]] virtual MemoryPool create_pool() = 0;
  /// Bytes of `pool` that live tensors hold now: its part of `allocated`. Capture: legal. Not for the replay path.
  [[nodiscard]] virtual std::int64_t allocated_in(const MemoryPool& pool) const = 0;
  /// Exactly `bytes` bytes of page-locked host memory. Capture: illegal while the calling thread captures.
  /// Throws: DeviceError that says "pinned host memory" when it is exhausted.
  [[nodiscard]] virtual PinnedMemory allocate_pinned(std::size_t bytes) = 0;

  // --- graphs --------------------------------------------------------------------------------------------------

  /// Starts to capture `stream` (not the default stream; thread-local error mode). Until the end, tensors that are allocated while a
  /// stream of this capture is current come from `pool`. The default generator is registered, and so are `generators`, which are of this
  /// device. Each run of the graph continues to draw from the generators' current state; the capture itself draws nothing. The graph
  /// keeps the generators. A draw from any other generator on a capturing stream throws. Throws: UsageError for a generator of another
  /// device.
  virtual void begin_capture(c10::Stream stream, const MemoryPool& pool,
                             c10::ArrayRef<at::Generator> generators = {}) = 0;
  /// Ends the capture begun on `stream` and instantiates the graph. Throws: CaptureError when it was invalidated or a forked
  /// stream was not joined; whatever happens, `stream` is not capturing afterwards. The graph must have finished its launches
  /// when it is destroyed.
  [[nodiscard]] virtual Graph end_capture(c10::Stream stream) = 0;
  /// Ends and discards the capture of `stream`, if there is one.
  virtual void abandon_capture(c10::Stream stream) noexcept = 0;
  [[nodiscard]] virtual CaptureStatus capture_status(c10::Stream stream) const = 0;
  /// Queues one run of `graph` on `stream`; random draws continue from the generators that its capture was begun with. Capture:
  /// illegal. Ordering: graphs that draw from one generator must run one after the other (its seed and offset lie in one place on the
  /// device): DrawOrder.
  virtual void launch(const Graph& graph, c10::Stream stream) = 0;
  /// True if `graph` draws random numbers: known since its capture ended.
  [[nodiscard]] virtual bool draws(const Graph& graph) const = 0;
  /// The nodes in capture order, for the checks of rule 5. Not for the replay path.
  [[nodiscard]] virtual std::vector<GraphNode> nodes(const Graph& graph) const = 0;
  /// How many nodes the capture of `stream` holds so far: nodes captured from now on follow them in `nodes`. 0 if the stream does not
  /// capture. Capture: legal.
  [[nodiscard]] virtual std::size_t captured_nodes(c10::Stream stream) const = 0;

 protected:
  template <HandleKind kind>
  friend class Handle;
  /// Called by owners only; never throws, reports failures on stderr.
  virtual void destroy(HandleKind kind, void* native) noexcept = 0;

 private:
  std::atomic<std::int64_t> live_handles_{0};
};

template <HandleKind kind>
Handle<kind>::Handle(Runtime& runtime, void* native) noexcept : runtime_(&runtime), native_(native) {
  if (native != nullptr) {
    runtime.live_handles_.fetch_add(1, std::memory_order_relaxed);
  }
}

template <HandleKind kind>
void Handle<kind>::reset() noexcept {
  if (native_ != nullptr) {
    runtime_->destroy(kind, std::exchange(native_, nullptr));
    runtime_->live_handles_.fetch_sub(1, std::memory_order_relaxed);
  }
}

/// Makes a stream current on the calling thread for its lifetime.
class [[nodiscard]] StreamGuard {
 public:
  StreamGuard(Runtime& runtime, c10::Stream stream) : runtime_(runtime), before_(runtime.current_stream()) {
    runtime_.set_current_stream(stream);
  }
  StreamGuard(const StreamGuard&) = delete;
  StreamGuard& operator=(const StreamGuard&) = delete;
  ~StreamGuard() { runtime_.set_current_stream(before_); }

 private:
  Runtime& runtime_;
  c10::Stream before_;
};

/// The runtime of `device`, from the backend that registered for its type (backend.h).
/// Throws: UsageError for a type that no loaded backend has; what the backend throws for a device that it has not.
[[nodiscard]] std::shared_ptr<Runtime> make_runtime(c10::Device device);

}  // namespace sidestream
