#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <c10/core/Stream.h>

#include "memory/host_arena.h"
#include "memory/shared_slots.h"
#include "offload/saved_storage.h"
#include "offload/step_trace.h"
#include "runtime/runtime.h"

namespace sidestream {

/// Counts of copies.
struct CopyCounts {
  std::uint64_t offloaded_bytes = 0;
  std::uint64_t reloaded_bytes = 0;
  std::uint64_t waits = 0;           ///< times a stream was made to wait for a copy
  std::uint64_t inline_reloads = 0;  ///< groups, or graphed calls, that were needed before their reload was begun
};

/// Offloads groups of storages to pinned host memory and reloads them: leases, queues the copies of each direction on a stream of its
/// own, and counts. All eager groups and graphed calls of an engine share one. They differ in which event says that a group is ready, and
/// in who decides when device memory is freed and allocated.
///
/// Ordering: copies of one direction run in the order in which they were queued, but no rule relies on that. Each copy starts after
/// everything that its user names. To wait for a copy, wait for an event that was recorded after it.
/// Capture: illegal, except `lease`.  Threads: any; copies of one direction are queued by one thread at a time.
class GroupMover {
  struct Direction;

 public:
  /// Copies of one direction that are being queued. If it dies unfinished (by an exception), those that were queued are done first:
  /// nothing else would tell when.
  class [[nodiscard]] Copies {
   public:
    Copies(const Copies&) = delete;
    Copies& operator=(const Copies&) = delete;
    ~Copies();

    /// Work that is queued from here on starts after everything that the stream holds now.
    void wait_for(c10::Stream stream);
    void wait_for(const Streams& streams);
    void wait_for(const ExternalEvent& ready);
    void wait_for(const Event& ready);
    /// After the copy that last touched the slot.
    void wait_for(const HostArena::Lease& slot);
    void to_host(void* host, const void* device, std::size_t bytes);
    void to_device(void* device, const void* host, std::size_t bytes);
    [[nodiscard]] c10::Stream stream() const { return direction_.stream.get(); }
    /// `done` stands for all that was queued.
    void record(const Event& done);
    void finish();

   private:
    friend class GroupMover;
    Copies(GroupMover& mover, Direction& direction);
    GroupMover& mover_;
    Direction& direction_;
    std::unique_lock<std::mutex> lock_;
    /// The copies that follow are another group's, or wait for something.
    void end_span();

    std::uint64_t bytes_ = 0;
    std::uint64_t bytes_before_span_ = 0;
    StepTrace::Span span_;
    bool finished_ = false;
  };

  GroupMover(std::shared_ptr<Runtime> runtime, std::shared_ptr<HostArena> arena);
  GroupMover(const GroupMover&) = delete;
  GroupMover& operator=(const GroupMover&) = delete;
  /// Blocks the host until all copies are done.
  ~GroupMover();

  /// Adds to `offloaded` those storages of the group that are to be offloaded and got pinned memory; the others stay from here on, and the
  /// group counts them. `places`: null for slots of their own.
  void lease(Group& group, std::vector<std::shared_ptr<SavedStorage>>& offloaded, HostPlaces* places = nullptr);
  [[nodiscard]] Copies offload_copies() { return {*this, offloads_}; }
  [[nodiscard]] Copies reload_copies() { return {*this, reloads_}; }
  /// Makes `stream` wait for copies that `done` stands for. `name`: of the wait in a trace; null for that of the innermost Site.
  void await(c10::Stream stream, const Event& done, const char* name = nullptr);
  /// Makes the streams wait for all copies that were queued.
  void join(const Streams& streams);
  /// Blocks the host until all copies are done, or the device has failed.
  void settle() noexcept;

  /// Of the engine's steps.
  [[nodiscard]] StepTrace& trace() const noexcept { return *trace_; }

  void count_inline_reload() noexcept { ++inline_reloads_; }
  /// Copies that a graph holds itself, which was launched.
  void count_launched(const CopyCounts& copies) noexcept {
    offloads_.bytes += copies.offloaded_bytes;
    reloads_.bytes += copies.reloaded_bytes;
    inline_reloads_ += copies.inline_reloads;
  }
  [[nodiscard]] CopyCounts counts() const noexcept;
  /// Counting starts anew.
  CopyCounts take_counts() noexcept;

 private:
  struct Direction {
    OwnedStream stream;
    Event fork;
    std::mutex mutex;
    std::atomic<std::uint64_t> bytes{0};
  };
  void settle(const Direction& direction) noexcept;
  [[nodiscard]] HostPlace place_for(std::size_t bytes, HostPlaces* places, HostArena::Missing missing);

  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<HostArena> arena_;
  std::unique_ptr<StepTrace> trace_;
  Direction offloads_;
  Direction reloads_;
  std::atomic<std::uint64_t> waits_{0};
  std::atomic<std::uint64_t> inline_reloads_{0};
};

}  // namespace sidestream
