#include "memory/shared_slots.h"

#include <algorithm>
#include <utility>

#include "memory/host_slabs.h"

namespace sidestream {

SharedSlots::Share::Share(SharedSlots& slots) : slots_(slots) {
  std::erase_if(slots_.slots_, [](const auto& slot) { return slot.expired(); });
  for (const auto& weak : slots_.slots_) {
    if (auto slot = weak.lock(); slot != nullptr) {
      held_.push_back(std::move(slot));
    }
  }
}

std::size_t SharedSlots::Share::room() const noexcept {
  std::size_t bytes = 0;
  for (std::size_t slot = next_; slot < held_.size(); ++slot) {
    bytes += held_[slot]->bytes();
  }
  return bytes - taken_;
}

void SharedSlots::Share::lease(HostArena& arena, std::span<const std::size_t> sizes) {
  for (const std::size_t bytes : sizes) {
    if (HostArena::Lease lease = arena.lease(bytes)) {
      held_.push_back(std::make_shared<HostArena::Lease>(std::move(lease)));
      slots_.slots_.emplace_back(held_.back());
    }
  }
}

SharedSlots::Parts SharedSlots::Share::take(std::size_t bytes) {
  Parts parts;
  std::size_t room_left = aligned_slot(bytes);
  if (room_left > room()) {
    return parts;
  }
  while (room_left > 0) {
    const auto& slot = held_[next_];
    const std::size_t part = std::min(room_left, slot->bytes() - taken_);
    if (part > 0) {
      parts.push_back({slot, slot->data() + taken_, std::min(part, bytes)});
      bytes -= parts.back().bytes;
      room_left -= part;
      taken_ += part;
    }
    if (taken_ == slot->bytes()) {
      ++next_;
      taken_ = 0;
    }
  }
  return parts;
}

}  // namespace sidestream
