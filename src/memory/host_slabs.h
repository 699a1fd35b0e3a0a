#pragma once
#include <cstddef>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "memory/host_arena.h"
#include "runtime/runtime.h"

namespace sidestream {

[[nodiscard]] constexpr std::size_t aligned_slot(std::size_t bytes) {
  return (bytes + HostArena::alignment - 1) / HostArena::alignment * HostArena::alignment;
}

struct HostArena::Slot {
  // By size, and among equals by how long they are back: the one longest back is the likeliest to be done.
  using Free = std::multimap<std::size_t, Slot*>;

  std::byte* data = nullptr;
  Slab* slab = nullptr;
  std::shared_ptr<const Event> last_copy;  // the next lessee waits for it
  Free::node_type place;                   // while it is leased, so that neither a lease nor its end allocates
};

/// Memory pinned at once, and the slots that it is cut into.
struct HostArena::Slab {
  PinnedMemory memory;
  std::deque<Slot> slots;  // addresses stay
  std::size_t leased = 0;
};

struct HostArena::State {
  State(Runtime& runtime_in, std::shared_ptr<HostBudget> budget_in)
      : runtime(runtime_in), budget(std::move(budget_in)) {
    stats.cap = budget->cap();
  }
  ~State();

  /// False if the budget has no room. Throws: DeviceError; nothing is pinned then.
  [[nodiscard]] bool pin(std::size_t bytes);
  void add_slot(Slab& slab, std::byte* data, std::size_t bytes);
  /// Takes the slots out of the slabs that no lease is in, once their last copies are done.
  void dissolve_unused();
  /// Cuts slots of these sizes out of slabs without slots; a slab that is still without is given back. Returns what found no place.
  [[nodiscard]] std::vector<std::size_t> cut(const std::vector<std::size_t>& largest_first);
  void put_back(Slot& slot) noexcept;
  Slot* take(std::size_t bytes);
  void wait_for_copies(const std::function<bool(const Slab&)>& of) noexcept;
  void trim();
  /// The slabs that no lease is in and that `largest_first` finds no use for are given back.
  void give_back_but(const std::vector<std::size_t>& largest_first);
  /// Takes free slots for as many of `largest_first` as there are; `missing` gets the others. To be put back.
  [[nodiscard]] std::vector<Slot*> claim(const std::vector<std::size_t>& largest_first,
                                         std::vector<std::size_t>& missing);
  /// Those of `largest_first` that find no free slot while the others have theirs.
  [[nodiscard]] std::vector<std::size_t> missing_of(const std::vector<std::size_t>& largest_first);

  Runtime& runtime;
  std::shared_ptr<HostBudget> budget;
  mutable std::mutex mutex;
  std::list<Slab> slabs;  // addresses stay
  Slot::Free free;
  HostArenaStats stats;
  bool sealed = false;
};

}  // namespace sidestream
