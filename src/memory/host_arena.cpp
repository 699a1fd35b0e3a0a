#include "memory/host_arena.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <c10/util/ScopeExit.h>

#include "memory/host_slabs.h"
#include "sidestream/error.h"

namespace sidestream {

HostArena::HostArena(Runtime& runtime, std::size_t cap_bytes)
    : HostArena(runtime, std::make_shared<HostBudget>(cap_bytes)) {}
HostArena::HostArena(Runtime& runtime, std::shared_ptr<HostBudget> budget)
    : state_(std::make_shared<State>(runtime, std::move(budget))) {}
HostArena::~HostArena() = default;

std::vector<bool> HostArena::plan(std::span<const std::size_t> sizes) {
  const std::lock_guard lock(state_->mutex);
  if (state_->sealed) {
    throw UsageError("host arena: plan() after seal(); plan every group before the arena is sealed");
  }
  std::vector<bool> placed;
  std::vector<std::pair<std::size_t, std::size_t>> offsets;  // (offset, bytes)
  placed.reserve(sizes.size());
  const std::size_t free_bytes = state_->budget->room();
  std::size_t end = 0;
  for (const std::size_t bytes : sizes) {
    const std::size_t begin = aligned_slot(end);
    const bool fits = bytes <= free_bytes && begin <= free_bytes - bytes;
    placed.push_back(fits);
    if (fits && bytes > 0) {
      offsets.emplace_back(begin, bytes);
      end = begin + bytes;
    }
  }
  if (end > 0) {
    if (!state_->pin(end)) {  // another arena of the budget was quicker
      return std::vector<bool>(sizes.size(), false);
    }
    std::byte* const base = state_->slabs.back().memory.data();
    for (const auto& [offset, bytes] : offsets) {
      state_->add_slot(state_->slabs.back(), base + offset, bytes);
    }
  }
  return placed;
}

bool HostArena::prepare(std::span<const std::size_t> sizes, Surplus surplus) {
  std::vector<std::size_t> largest_first(sizes.begin(), sizes.end());
  std::sort(largest_first.rbegin(), largest_first.rend());
  std::vector<std::size_t> missing;
  {
    const std::lock_guard lock(state_->mutex);
    state_->sealed = false;
    missing = state_->missing_of(largest_first);
    if (!missing.empty()) {  // before more is pinned, pinned memory that is not leased is cut anew
      state_->dissolve_unused();
      missing = state_->cut(state_->missing_of(largest_first));
    }
    const auto aligned = [](std::size_t sum, std::size_t bytes) { return sum + aligned_slot(bytes); };
    if (std::accumulate(missing.begin(), missing.end(), std::size_t{0}, aligned) > state_->budget->room()) {
      state_->trim();  // slots of other sizes would take their room under the cap
      missing = state_->missing_of(largest_first);
    }
    if (surplus == Surplus::given_back) {
      state_->give_back_but(largest_first);
    }
  }
  const auto sealed = c10::make_scope_exit([this] { seal(); });  // or leases would pin in the middle of a step
  const std::vector<bool> placed = plan(missing);
  return std::find(placed.begin(), placed.end(), false) == placed.end();
}

void HostArena::trim() noexcept {
  const std::lock_guard lock(state_->mutex);
  state_->trim();
}

std::size_t HostArena::available() const noexcept {
  const std::lock_guard lock(state_->mutex);
  return state_->budget->room() + state_->stats.pinned - state_->stats.leased;
}

void HostArena::seal() noexcept {
  const std::lock_guard lock(state_->mutex);
  state_->sealed = true;
}

void HostArena::open() noexcept {
  const std::lock_guard lock(state_->mutex);
  state_->sealed = false;
}

void HostArena::forget_uses() noexcept {
  const std::lock_guard lock(state_->mutex);
  for (Slab& slab : state_->slabs) {
    for (Slot& slot : slab.slots) {
      slot.last_copy.reset();
    }
  }
}

bool HostArena::holds(const void* at, std::size_t bytes) const noexcept {
  const std::lock_guard lock(state_->mutex);
  const auto* const first = static_cast<const std::byte*>(at);
  return std::any_of(state_->slabs.begin(), state_->slabs.end(), [&](const Slab& slab) {
    return first >= slab.memory.data() && first + bytes <= slab.memory.data() + slab.memory.bytes();
  });
}

HostArena::Lease HostArena::lease(std::size_t bytes, Missing missing) {
  if (bytes == 0) {
    return {};
  }
  const std::lock_guard lock(state_->mutex);
  Slot* slot = state_->take(bytes);
  if (slot == nullptr && (!state_->sealed || missing == Missing::pinned)) {
    const bool sealed = std::exchange(state_->sealed, false);
    const auto as_before = c10::make_scope_exit([&] { state_->sealed = sealed; });
    if (state_->pin(bytes)) {
      state_->add_slot(state_->slabs.back(), state_->slabs.back().memory.data(), bytes);
      slot = state_->take(bytes);
    }
  }
  if (slot == nullptr) {
    state_->stats.refusals += 1;
    return {};
  }
  state_->stats.live_leases += 1;
  state_->stats.leased += bytes;
  return Lease(state_, slot, slot->data, bytes);
}

const std::shared_ptr<HostBudget>& HostArena::budget() const noexcept { return state_->budget; }

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
}

void HostArena::Lease::record_last_use(std::shared_ptr<const Event> event) noexcept {
  slot_->last_copy = std::move(event);
}

}  // namespace sidestream
