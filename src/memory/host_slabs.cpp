// The slabs of a host arena and the slots that they are cut into; all of it under the arena's mutex.
#include "memory/host_slabs.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <iterator>
#include <utility>

namespace sidestream {

HostArena::State::~State() {
  wait_for_copies([](const Slab&) { return true; });
  free.clear();
  slabs.clear();
  budget->give_back(stats.pinned);
}

// The slabs must not be unpinned under a copy. A thread that captures may not wait; the backend then defers what it must.
void HostArena::State::wait_for_copies(const std::function<bool(const Slab&)>& of) noexcept {
  try {
    if (runtime.capture_status(runtime.current_stream()) != CaptureStatus::none) {
      return;
    }
    const Event* waited = nullptr;
    for (const Slab& slab : slabs) {
      if (!of(slab)) {
        continue;
      }
      for (const Slot& slot : slab.slots) {
        if (slot.last_copy && slot.last_copy.get() != waited) {
          waited = slot.last_copy.get();
          runtime.synchronize(*waited);
        }
      }
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sidestream: the host arena frees its memory without waiting for the last copies: %s\n",
                 error.what());
  }
}

bool HostArena::State::pin(std::size_t bytes) {
  if (!budget->take(bytes)) {
    return false;
  }
  try {
    slabs.push_back({runtime.allocate_pinned(bytes), {}, 0});
  } catch (...) {
    budget->give_back(bytes);
    throw;
  }
  stats.pinned += bytes;
  stats.slabs += 1;
  if (sealed) {
    stats.allocations_after_seal += 1;
  }
  return true;
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
      found->second = aligned_slot(found->second + bytes);
    }
  }
  for (auto slab = slabs.begin(); slab != slabs.end();) {
    const bool goes = slab->slots.empty();
    const std::size_t given_back = goes ? slab->memory.bytes() : 0;
    stats.pinned -= given_back;
    stats.slabs -= goes ? 1 : 0;
    slab = goes ? slabs.erase(slab) : std::next(slab);
    budget->give_back(given_back);
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

}  // namespace sidestream
