#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/Generator.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>
#include <sidestream/testing/schedule.h>

#include "runtime/runtime.h"
#include "sim/device/event.h"

namespace sidestream::sim {

struct GraphBody;
struct Pool;

/// A byte range that a piece of work touches, on the device or in pinned host memory.
struct Access {
  const std::byte* begin = nullptr;
  std::size_t bytes = 0;
  bool write = false;
  bool fresh = false;  ///< a write to memory that the work took for itself: nothing of what it held is read
};

[[nodiscard]] inline bool overlap(const Access& a, const Access& b) noexcept {
  return a.begin < b.begin + b.bytes && b.begin < a.begin + a.bytes;
}

/// One unit of work of a stream: what queues, graphs and recordings hold.
struct Work {
  enum class Kind : std::uint8_t { compute, copy_to_host, copy_to_device, poison, event_record, event_wait };
  Kind kind = Kind::compute;
  c10::StreamId stream = 0;
  const char* name = "";      ///< operator or call; lives as long as the process
  const char* place = "";     ///< where it was issued, from Device::place; lives as long as the process
  std::function<void()> run;  ///< does the work (again) at the same addresses; empty for events
  std::vector<Access> accesses;
  std::uint32_t random_draws = 0;  ///< 32-bit outputs of `generator` that one run consumes
  bool draws_vary = false;         ///< that number depends on data, or on the state of `generator`
  at::Generator generator;         ///< undefined if it is not random

  [[nodiscard]] bool draws() const noexcept { return random_draws > 0 || draws_vary; }
};

/// Held while an operator draws: see draws_lock.
struct DrawLock {
  std::unique_lock<std::mutex> any;
  std::unique_lock<std::mutex> own;  ///< of a generator that is not the default one
};

/// The calling thread's current stream. Both backends of LibTorch's stream guard and SimRuntime go through these.
[[nodiscard]] c10::StreamId current_stream() noexcept;
void set_current_stream(c10::StreamId stream) noexcept;

/// The simulated accelerator: memory, streams and events of the process. LibTorch's registration of a device is process-wide, so this is
/// too. It is created on first use and never destroyed.
///
/// Operators (`operators.cpp`) use it as follows: every boxed operator calls `ready` with its stream and runs the CPU kernel at once on
/// aliased memory. If `keeps(stream)`, it hands what it did to `issued`.
/// Threads: any; one lock around all state. No call holds it while it calls back into LibTorch, except for the work that it runs.
class Device {
 public:
  [[nodiscard]] static Device& get();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // --- memory --------------------------------------------------------------------------------------------------
  // Blocks are 512-byte aligned, split and coalesced, keyed by stream and pool as CUDA's caching allocator does.

  /// While `stream` captures, the pool is the capture's. Throws: DeviceError when the device is full.
  [[nodiscard]] void* allocate(std::size_t bytes, c10::StreamId stream);
  /// The block may be reused at once by work on the stream it was allocated for. If work is kept, a poison is issued.
  void free(void* block) noexcept;
  /// Work on `stream` uses the block that starts at `block`, though the block was allocated for another stream. Once the block is freed,
  /// it is handed out again only when all work that `stream` has queued by then is done. During a recording it is not handed out again at
  /// all, because a rerun does not see that the work was done.
  void used_on(const void* block, c10::StreamId stream) noexcept;
  [[nodiscard]] bool owns(const void* address) const noexcept;
  [[nodiscard]] MemoryStats memory_stats() const;
  void reset_peak_memory_stats();
  [[nodiscard]] DeviceRoom room() const;
  [[nodiscard]] MemoryRefusal latest_refusal() const;
  void release_cached_memory();
  [[nodiscard]] std::int64_t memory_bytes() const noexcept;

  /// Segments beyond this many bytes fail, as on a smaller device.
  void set_memory_limit(std::size_t bytes);
  /// The allocation number `n` (from 0) from here on fails, once, as on a full device; none if negative. For tests.
  void fail_allocation(std::int64_t n);
  /// Whether it has failed since.
  [[nodiscard]] bool allocation_failed() const;

  [[nodiscard]] Pool* create_pool();
  [[nodiscard]] std::int64_t allocated_in(const Pool& pool) const;
  void retain_pool(Pool* pool) noexcept;
  /// Gives one reference back.
  void release_pool(Pool* pool) noexcept;
  /// Memory that graphs take besides tensors. Throws: DeviceError if the device is full.
  void take_outside(std::size_t bytes, const char* what);
  void give_back_outside(std::size_t bytes) noexcept;

  /// Page-locked host memory: the only host memory that asynchronous copies accept.
  [[nodiscard]] void* allocate_pinned(std::size_t bytes);
  void free_pinned(void* data) noexcept;
  [[nodiscard]] bool pinned(const void* address, std::size_t bytes = 1) const noexcept;
  /// Allocations beyond this many pinned bytes fail.
  void set_pinned_limit(std::size_t bytes);

  // --- operators -----------------------------------------------------------------------------------------------

  /// Runs all queued work that later work on `stream` is ordered after, so that an operator may compute at issue.
  /// Throws: CaptureError when the stream's capture was invalidated, or when this thread captures and `stream` is the default.
  void ready(c10::StreamId stream);
  /// The operator has allocated memory on `stream`: another thread may have freed it since `ready`, behind work that is queued now.
  void ready_again(c10::StreamId stream);
  /// True if work on `stream` must be handed to `issued`: it captures, or a recording is on.
  [[nodiscard]] bool keeps(c10::StreamId stream) const noexcept;
  /// True while `stream` captures. The operator side then reports what it is about to overwrite in place.
  [[nodiscard]] bool capturing(c10::StreamId stream) const noexcept;
  /// Around an operator that draws from `generator`, one at a time: waits while another thread has the device's CaptureTurn (a
  /// backward pass does not). Throws: UsageError if `stream` captures and the capture does not know the generator, and where another
  /// capture has it; the captures go on.
  [[nodiscard]] DrawLock draw(c10::StreamId stream, const at::Generator& generator);
  /// Waits for an operator that draws just now.
  void let_draws_finish();
  /// In a capture, before an operator writes `bytes` at `address` in place: keeps the old content if it lies outside of what
  /// the capture allocated, to be put back when the capture ends.
  void preserve(const void* address, std::size_t bytes, c10::StreamId stream);
  /// Takes over compute work that has already been done once.
  void issued(Work work);
  /// An operator asks for a value on the host (`item`, a copy to unpinned memory, printing): waits for `stream`, or throws
  /// CaptureError and invalidates the capture. `why`: after `what`, in that error.
  void host_reads(c10::StreamId stream, const char* what,
                  const char* why = "reads a value on the host; keep it out of the captured part");

  // --- streams and events --------------------------------------------------------------------------------------

  [[nodiscard]] c10::StreamId create_stream();
  void destroy_stream(c10::StreamId stream) noexcept;
  void synchronize(c10::StreamId stream);
  void synchronize();
  [[nodiscard]] bool idle(c10::StreamId stream);

  void record(EventState& event, c10::StreamId stream);
  void wait(c10::StreamId stream, EventState& event);
  [[nodiscard]] bool query(EventState& event);
  void synchronize(EventState& event);

  /// Asynchronous copy on `stream`; the kind says which side is pinned host memory.
  void copy(Work::Kind kind, void* destination, const void* source, std::size_t bytes, c10::StreamId stream);

  // --- captures and graphs -------------------------------------------------------------------------------------

  /// Launches of the graph will draw on from the default generator and from `generators`.
  void begin_capture(c10::StreamId stream, Pool* pool, c10::ArrayRef<at::Generator> generators);
  /// Returns the graph; the caller owns one reference. Each of its nodes takes `graph_node_bytes` of the device. Throws: DeviceError if
  /// there is no room for them.
  [[nodiscard]] std::shared_ptr<GraphBody> end_capture(c10::StreamId stream);
  void abandon_capture(c10::StreamId stream) noexcept;
  [[nodiscard]] CaptureStatus capture_status(c10::StreamId stream) const;
  [[nodiscard]] std::size_t captured_nodes(c10::StreamId stream) const;
  void launch(const std::shared_ptr<GraphBody>& graph, c10::StreamId stream);

  // --- how queued work runs ------------------------------------------------------------------------------------

  /// Where the calling thread issues work, by Site: "offload blocks.0.proj". For work that is kept.
  [[nodiscard]] const char* place();

  /// Drains the device, then runs by `schedule`.
  void set_schedule(const Schedule& schedule);
  [[nodiscard]] Schedule schedule() const;
  /// Strict: a wait on an event that was never recorded throws UsageError. Else it is counted.
  void set_strict(bool strict);
  [[nodiscard]] std::uint64_t unrecorded_waits() const;

  /// All that it owns, for the rooms of the simulator that stand on it (state.h).
  struct State;
  [[nodiscard]] State& state() noexcept { return *state_; }

 private:
  Device();
  ~Device() = default;
  std::unique_ptr<State> state_;
};

}  // namespace sidestream::sim
