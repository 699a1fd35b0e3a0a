#include "memory/host_arena.h"

#include <algorithm>
#include <cstdio>
#include <deque>
#include <exception>
#include <functional>
#include <iterator>
#include <list>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>

#include "runtime/runtime.h"
#include "sidestream/error.h"

namespace sidestream {

struct HostArena::Slot {
  // By size, and among equals by how long they are back: the one longest back is the likeliest to be done.
  using Free = std::multimap<std::size_t, Slot*>;

  std::byte* data = nullptr;
  Slab* slab = nullptr;
  // At most one of the two is set: what the next lessee waits for.
  std::shared_ptr<const Event> last_copy;
  std::shared_ptr<const ExternalEvent> last_copies_done;
  std::shared_ptr<Event> own;
  Free::node_type place;  // while it is leased, so that neither a lease nor its end allocates
};

/// Memory pinned at once, and the slots that it is cut into.
struct HostArena::Slab {
  PinnedMemory memory;
  std::deque<Slot> slots;  // addresses stay
  std::size_t leased = 0;
};

struct HostArena::State {
  State(Runtime& runtime_in, std::size_t cap) : runtime(runtime_in) { stats.cap = cap; }
  ~State();

  void pin(std::size_t bytes);
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
  mutable std::mutex mutex;
  std::list<Slab> slabs;  // addresses stay
  Slot::Free free;
  HostArenaStats stats;
  bool sealed = false;
};

namespace {

std::size_t align_up(std::size_t bytes) {
  return (bytes + HostArena::alignment - 1) / HostArena::alignment * HostArena::alignment;
}

}  // namespace

HostArena::State::~State() {
  wait_for_copies([](const Slab&) { return true; });
}

// The slabs must not be unpinned under a copy. A thread that captures may not wait; the backend then defers what it must.
void HostArena::State::wait_for_copies(const std::function<bool(const Slab&)>& of) noexcept {
  try {
    if (runtime.capture_status(runtime.current_stream()) != CaptureStatus::none) {
      return;
    }
    const Event* waited = nullptr;
    bool copies_done = false;
    const auto for_each_slot = [&](const auto& visit) {
      for (const Slab& slab : slabs) {
        if (of(slab)) {
          std::for_each(slab.slots.begin(), slab.slots.end(), visit);
        }
      }
    };
    for_each_slot([&](const Slot& slot) {
      if (slot.last_copy && slot.last_copy.get() != waited) {
        waited = slot.last_copy.get();
        runtime.synchronize(*waited);
      }
      copies_done = copies_done || slot.last_copies_done != nullptr;
    });
    if (copies_done) {
      const OwnedStream stream = runtime.create_stream();
      const ExternalEvent* joined = nullptr;
      for_each_slot([&](const Slot& slot) {
        if (slot.last_copies_done && slot.last_copies_done.get() != joined) {
          joined = slot.last_copies_done.get();
          runtime.wait(stream, *joined);
        }
      });
      runtime.synchronize(stream);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sidestream: host arena gives its memory back without waiting for the last copies: %s\n",
                 error.what());
  }
}

void HostArena::State::pin(std::size_t bytes) {
  slabs.push_back({runtime.allocate_pinned(bytes), {}, 0});
  stats.pinned += bytes;
  stats.slabs += 1;
  if (sealed) {
    stats.allocations_after_seal += 1;
  }
}

void HostArena::State::add_slot(Slab& slab, std::byte* data, std::size_t bytes) {
  Slot& slot = slab.slots.emplace_back();
  slot.data = data;
  slot.slab = &slab;
  free.emplace(bytes, &slot);
  stats.requested += bytes;
}

void HostArena::State::put_back(Slot& slot) noexcept {
  slot.slab->leased -= 1;
  free.insert(std::move(slot.place));
}

std::vector<HostArena::Slot*> HostArena::State::claim(const std::vector<std::size_t>& largest_first,
                                                      std::vector<std::size_t>& missing) {
  std::vector<Slot*> claimed;
  for (const std::size_t bytes : largest_first) {
    if (Slot* slot = take(bytes); slot != nullptr) {
      claimed.push_back(slot);
    } else {
      missing.push_back(bytes);
    }
  }
  return claimed;
}

std::vector<std::size_t> HostArena::State::missing_of(const std::vector<std::size_t>& largest_first) {
  std::vector<std::size_t> missing;
  for (Slot* slot : claim(largest_first, missing)) {
    put_back(*slot);
  }
  return missing;
}

void HostArena::State::give_back_but(const std::vector<std::size_t>& largest_first) {
  std::vector<std::size_t> missing;
  const std::vector<Slot*> claimed = claim(largest_first, missing);
  trim();
  for (Slot* slot : claimed) {
    put_back(*slot);
  }
}

void HostArena::State::dissolve_unused() {
  const auto unused = [](const Slab& slab) { return slab.leased == 0; };
  wait_for_copies(unused);
  for (auto place = free.begin(); place != free.end();) {
    const bool goes = unused(*place->second->slab);
    stats.requested -= goes ? place->first : 0;
    place = goes ? free.erase(place) : std::next(place);
  }
  for (Slab& slab : slabs) {
    if (unused(slab)) {
      slab.slots.clear();
    }
  }
}

std::vector<std::size_t> HostArena::State::cut(const std::vector<std::size_t>& largest_first) {
  std::vector<std::pair<Slab*, std::size_t>> open;  // and where its next slot begins
  for (Slab& slab : slabs) {
    if (slab.slots.empty()) {
      open.emplace_back(&slab, 0);
    }
  }
  std::vector<std::size_t> homeless;
  for (const std::size_t bytes : largest_first) {
    const auto room = [](const auto& slab) {
      return slab.first->memory.bytes() - std::min(slab.first->memory.bytes(), slab.second);
    };
    auto found = open.end();  // the tightest: what is whole may be given back
    for (auto slab = open.begin(); slab != open.end(); ++slab) {
      if (room(*slab) >= bytes && (found == open.end() || room(*slab) < room(*found))) {
        found = slab;
      }
    }
    if (found == open.end()) {
      homeless.push_back(bytes);
    } else if (bytes > 0) {
      add_slot(*found->first, found->first->memory.data() + found->second, bytes);
      found->second = align_up(found->second + bytes);
    }
  }
  for (auto slab = slabs.begin(); slab != slabs.end();) {
    const bool goes = slab->slots.empty();
    stats.pinned -= goes ? slab->memory.bytes() : 0;
    stats.slabs -= goes ? 1 : 0;
    slab = goes ? slabs.erase(slab) : std::next(slab);
  }
  return homeless;
}

void HostArena::State::trim() {
  dissolve_unused();
  (void)cut({});
}

HostArena::Slot* HostArena::State::take(std::size_t bytes) {
  const auto smallest = free.lower_bound(bytes);
  if (smallest == free.end()) {
    return nullptr;
  }
  Slot* const slot = smallest->second;
  slot->place = free.extract(smallest);
  slot->slab->leased += 1;
  return slot;
}

HostArena::HostArena(Runtime& runtime, std::size_t cap_bytes) : state_(std::make_shared<State>(runtime, cap_bytes)) {}
HostArena::~HostArena() = default;

std::vector<bool> HostArena::plan(std::span<const std::size_t> sizes) {
  const std::lock_guard lock(state_->mutex);
  if (state_->sealed) {
    throw UsageError("host arena: plan() after seal(); plan every group before the arena is sealed");
  }
  std::vector<bool> placed;
  std::vector<std::pair<std::size_t, std::size_t>> offsets;  // (offset, bytes)
  placed.reserve(sizes.size());
  const std::size_t free_bytes = state_->stats.cap - state_->stats.pinned;
  std::size_t end = 0;
  for (const std::size_t bytes : sizes) {
    const std::size_t begin = align_up(end);
    const bool fits = bytes <= free_bytes && begin <= free_bytes - bytes;
    placed.push_back(fits);
    if (fits && bytes > 0) {
      offsets.emplace_back(begin, bytes);
      end = begin + bytes;
    }
  }
  if (end > 0) {
    state_->pin(end);
    std::byte* const base = state_->slabs.back().memory.data();
    for (const auto& [offset, bytes] : offsets) {
      state_->add_slot(state_->slabs.back(), base + offset, bytes);
    }
  }
  return placed;
}

void HostArena::prepare(std::span<const std::size_t> sizes, Surplus surplus) {
  std::vector<std::size_t> largest_first(sizes.begin(), sizes.end());
  std::sort(largest_first.rbegin(), largest_first.rend());
  std::vector<std::size_t> missing;
  {
    const std::lock_guard lock(state_->mutex);
    state_->sealed = false;
    missing = state_->missing_of(largest_first);
    if (!missing.empty()) {  // before more is pinned, what is pinned and in nobody's hands is cut anew
      state_->dissolve_unused();
      missing = state_->cut(state_->missing_of(largest_first));
    }
    const auto aligned = [](std::size_t sum, std::size_t bytes) { return sum + align_up(bytes); };
    if (std::accumulate(missing.begin(), missing.end(), std::size_t{0}, aligned) >
        state_->stats.cap - state_->stats.pinned) {
      state_->trim();  // slots of other sizes would take their room under the cap
      missing = state_->missing_of(largest_first);
    }
    if (surplus == Surplus::given_back) {
      state_->give_back_but(largest_first);
    }
  }
  try {
    plan(missing);
  } catch (...) {
    seal();  // or leases would pin in the middle of a step
    throw;
  }
  seal();
}

void HostArena::trim() noexcept {
  const std::lock_guard lock(state_->mutex);
  state_->trim();
}

std::size_t HostArena::available() const noexcept {
  const std::lock_guard lock(state_->mutex);
  return state_->stats.cap - state_->stats.leased;
}

void HostArena::seal() noexcept {
  const std::lock_guard lock(state_->mutex);
  state_->sealed = true;
}

void HostArena::open() noexcept {
  const std::lock_guard lock(state_->mutex);
  state_->sealed = false;
}

bool HostArena::sealed() const noexcept {
  const std::lock_guard lock(state_->mutex);
  return state_->sealed;
}

HostArena::Lease HostArena::lease(std::size_t bytes) {
  if (bytes == 0) {
    return {};
  }
  const std::lock_guard lock(state_->mutex);
  Slot* slot = state_->take(bytes);
  if (slot == nullptr && !state_->sealed && bytes <= state_->stats.cap - state_->stats.pinned) {
    state_->pin(bytes);
    state_->add_slot(state_->slabs.back(), state_->slabs.back().memory.data(), bytes);
    slot = state_->take(bytes);
  }
  if (slot == nullptr) {
    state_->stats.refusals += 1;
    return {};
  }
  state_->stats.live_leases += 1;
  state_->stats.leased += bytes;
  state_->stats.leased_peak = std::max(state_->stats.leased_peak, state_->stats.leased);
  return Lease(state_, slot, slot->data, bytes);
}

HostArenaStats HostArena::stats() const {
  const std::lock_guard lock(state_->mutex);
  return state_->stats;
}

HostArena::Lease::Lease(Lease&& other) noexcept
    : state_(std::move(other.state_)),
      slot_(std::exchange(other.slot_, nullptr)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

HostArena::Lease& HostArena::Lease::operator=(Lease&& other) noexcept {
  if (this != &other) {
    reset();
    state_ = std::move(other.state_);
    slot_ = std::exchange(other.slot_, nullptr);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

void HostArena::Lease::reset() noexcept {
  if (state_ == nullptr) {
    return;
  }
  {
    const std::lock_guard lock(state_->mutex);
    state_->put_back(*slot_);
    state_->stats.live_leases -= 1;
    state_->stats.leased -= bytes_;
  }
  slot_ = nullptr;
  data_ = nullptr;
  bytes_ = 0;
  state_.reset();
}

void HostArena::Lease::wait_before_use(c10::Stream stream) const {
  if (slot_->last_copy) {
    state_->runtime.wait(stream, *slot_->last_copy);
  }
  if (slot_->last_copies_done) {
    state_->runtime.wait(stream, *slot_->last_copies_done);
  }
}

void HostArena::Lease::record_last_use(c10::Stream stream) {
  if (!slot_->own) {
    slot_->own = std::make_shared<Event>(state_->runtime.create_event());
  }
  state_->runtime.record(*slot_->own, stream);
  slot_->last_copy = slot_->own;
  slot_->last_copies_done.reset();
}

void HostArena::Lease::record_last_use(std::shared_ptr<const Event> event) noexcept {
  slot_->last_copy = std::move(event);
  slot_->last_copies_done.reset();
}

void HostArena::Lease::record_last_use(std::shared_ptr<const ExternalEvent> copies_done) noexcept {
  slot_->last_copies_done = std::move(copies_done);
  slot_->last_copy.reset();
}

}  // namespace sidestream
