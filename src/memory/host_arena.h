#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <c10/core/Stream.h>

#include "memory/host_budget.h"
#include "runtime/handles.h"

namespace sidestream {

/// Pinned host memory in the report; all in bytes but the last four.
struct HostArenaStats {
  std::size_t cap = 0;
  std::size_t requested = 0;  ///< sum of the sizes asked for that got room, exact
  std::size_t pinned =
      0;  ///< page-locked bytes held, alignment gaps included; of all that share the cap never above it
  std::size_t leased = 0;  ///< bytes leased now
  std::size_t slabs = 0;
  std::size_t live_leases = 0;
  std::size_t refusals = 0;                ///< leases refused for want of room
  std::size_t allocations_after_seal = 0;  ///< must be 0
};

/// Page-locked host memory of exact sizes, under a hard cap. Slabs are pinned before the work starts and cut into slots that are 512-byte
/// aligned. Captured groups lease slots for their graph's life, eager groups from step to step.
///
/// A slot may be used again only when the copy that last touched it is done, in either direction. So a lease is returned with the event
/// of that copy, and the next lessee's stream waits for that event: see Lease.
/// Threads: any; one Lease is used by one thread at a time. The Runtime must outlive the arena and its leases.
class HostArena {
  struct State;
  struct Slab;
  struct Slot;

 public:
  /// A slot of the arena, leased until this object is destroyed. Move-only; empty after a move, or when there was no room.
  /// Outliving the arena is safe: the slab lives until its last lease is back.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept;
    Lease& operator=(Lease&& other) noexcept;
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    /// Gives the slot back, with the last use noted by `record_last_use`.
    ~Lease() { reset(); }
    void reset() noexcept;

    [[nodiscard]] explicit operator bool() const noexcept { return state_ != nullptr; }
    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    /// The bytes asked for (the slot may be larger).
    [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

    /// Makes `stream` wait for the copy that last touched this slot, under this or an earlier lease. A no-op on a new slot. Call before
    /// each write of the slot.
    /// Capture: illegal. Throws: as Runtime::wait.
    void wait_before_use(c10::Stream stream) const;

    /// Notes that a copy touches the slot. The caller records `event` after the copy. One event may serve a whole group.
    void record_last_use(std::shared_ptr<const Event> event) noexcept;

   private:
    friend class HostArena;
    Lease(std::shared_ptr<State> state, Slot* slot, std::byte* data, std::size_t bytes) noexcept
        : state_(std::move(state)), slot_(slot), data_(data), bytes_(bytes) {}
    std::shared_ptr<State> state_;
    Slot* slot_ = nullptr;
    std::byte* data_ = nullptr;
    std::size_t bytes_ = 0;
  };

  static constexpr std::size_t alignment = 512;

  /// What happens to pinned memory that a plan does not need and that has no lease.
  enum class Surplus : std::uint8_t { kept, given_back };

  /// Pins nothing yet. `cap_bytes` bounds the page-locked bytes for good.
  HostArena(Runtime& runtime, std::size_t cap_bytes);
  /// `budget` bounds those of all arenas that share it.
  HostArena(Runtime& runtime, std::shared_ptr<HostBudget> budget);
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;
  /// Live leases keep their slabs; the rest is given back once the last copies are done.
  ~HostArena();

  /// Pins slots of these sizes (bytes), in this order, as far as the cap allows; the result says which got one. Adds to
  /// earlier plans. Capture: illegal. Throws: UsageError after `seal`; DeviceError when pinning fails (nothing is kept).
  std::vector<bool> plan(std::span<const std::size_t> sizes);
  /// Plans for a later pass. Pins what is missing, so that leases of all these sizes can live at once, besides those that live now; then
  /// seals. If memory is missing, slabs without a lease are cut anew first. Slabs that are not used after that are freed. If the
  /// cap has no room for the missing memory besides the cut slabs, these are freed too. `surplus`: what happens to slabs that these sizes
  /// do not need if nothing is missing. False if the cap has no room for all of them.
  /// Capture: illegal. Throws: DeviceError if pinning fails: nothing is added and the arena is sealed.
  bool prepare(std::span<const std::size_t> sizes, Surplus surplus = Surplus::kept);
  /// Gives back the slabs that no lease is in, once their last copies are done: between a plan and the next.
  /// Capture: illegal.
  void trim() noexcept;
  /// Bytes that `prepare` may still serve: what remains under the cap, and what is pinned but not leased.
  [[nodiscard]] std::size_t available() const noexcept;
  /// No allocation from here on: `lease` serves free slots only.
  void seal() noexcept;
  /// The opposite, until the next `seal` or `prepare`: sizes are not known yet.
  void open() noexcept;

  /// Forgets all uses noted so far: neither the next lessee nor the arena's end waits for them. Those copies were captured, and the owner
  /// of their graph waits for the graph before it releases the arena.
  void forget_uses() noexcept;
  /// True if all of these bytes lie in memory that the arena has pinned.
  [[nodiscard]] bool holds(const void* at, std::size_t bytes) const noexcept;

  /// What `lease` does if no slot is free.
  enum class Missing : std::uint8_t {
    refused,  ///< after `seal`
    pinned,   ///< after `seal` too: no plan knows what is leased
  };
  /// The smallest free slot that holds `bytes`, among equals the one longest back. Before `seal` a missing slot is pinned if
  /// the cap has room; after it `missing` decides. Empty if there is no room, and for 0 bytes.
  /// Capture: legal if nothing is pinned (no driver call), illegal else.
  [[nodiscard]] Lease lease(std::size_t bytes, Missing missing = Missing::refused);

  [[nodiscard]] HostArenaStats stats() const;
  [[nodiscard]] const std::shared_ptr<HostBudget>& budget() const noexcept;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace sidestream
