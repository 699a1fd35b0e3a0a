#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "memory/host_arena.h"

namespace sidestream {

/// Slots of an arena that several users have by turns, never two at a time. A new user takes the slots that others lease, from the first
/// one on, and leases only what it lacks. So together they lease what the largest user needs. A slot is returned to the arena when no
/// user that took of it is left.
///
/// Ordering: adds no waits. A user's copies begin after those of the user that had the turn before.
/// Threads: one at a time; parts may be released on any.
class SharedSlots {
 public:
  /// Of a slot, which lives as long as any of its parts.
  struct Part {
    std::shared_ptr<HostArena::Lease> slot;
    std::byte* data = nullptr;
    std::size_t bytes = 0;
  };
  using Parts = std::vector<Part>;

  /// The slots that one user takes. While it lives it holds all slots, so that no slot is returned before it has taken its own.
  class Share {
   public:
    explicit Share(SharedSlots& slots);
    /// Bytes that are left to take, a multiple of HostArena::alignment.
    [[nodiscard]] std::size_t room() const noexcept;
    /// Leases slots of these sizes (multiples of HostArena::alignment), which the arena has prepared. They follow the existing ones.
    void lease(HostArena& arena, std::span<const std::size_t> sizes);
    /// The next `bytes`, in several parts if they cross slots. Nothing if there is not that much room.
    [[nodiscard]] Parts take(std::size_t bytes);

   private:
    SharedSlots& slots_;
    std::vector<std::shared_ptr<HostArena::Lease>> held_;
    std::size_t next_ = 0;   ///< the slot that is taken from
    std::size_t taken_ = 0;  ///< of it
  };

  explicit SharedSlots(const std::shared_ptr<HostArena>& arena) : arena_(arena) {}
  [[nodiscard]] bool are_of(const std::shared_ptr<HostArena>& arena) const noexcept { return arena_.lock() == arena; }
  [[nodiscard]] bool expired() const noexcept { return arena_.expired(); }

 private:
  std::weak_ptr<HostArena> arena_;
  std::vector<std::weak_ptr<HostArena::Lease>> slots_;
};

/// Where bytes lie on the host: in a slot of their own, or in parts of shared ones.
struct HostPlace {
  HostArena::Lease lease;
  SharedSlots::Parts parts;

  [[nodiscard]] explicit operator bool() const noexcept { return lease || !parts.empty(); }
};

}  // namespace sidestream
