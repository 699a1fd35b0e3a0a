// The part of EagerOffload that delays copies until the next graph, or until the program says so. See Note [Eager choreography] in
// eager_offload.cpp.
#include <algorithm>

#include "base/site.h"
#include "offload/eager_offload.h"
#include "runtime/replayed_memory.h"

namespace sidestream {

// Without a plan the window is not known yet, and a first step must fit.
bool EagerOffload::is_delayed(const Group& group, const Slot& slot) const {
  const auto is_replayed = [](const std::shared_ptr<SavedStorage>& saved) {
    return ReplayedMemory::of(saved->device.data_ptr()) != nullptr;
  };
  return (group.scope->delayed || group.ended_later) && planned_window_ && !group.to_be_captured &&
         !slot.sources.empty() && std::none_of(slot.sources.begin(), slot.sources.end(), is_replayed);
}

void EagerOffload::delay(Slot& slot) {
  delayed_.push_back(&slot);
  slot.state = Slot::State::delayed;
  any_delayed_.store(true, std::memory_order_relaxed);
}

void EagerOffload::send_delayed() {
  const std::lock_guard lock(mutex_);
  while (!delayed_.empty()) {
    send_delayed(*delayed_.front());
  }
}

void EagerOffload::send_delayed(Slot& slot) {
  const Site site(Activity::offload, slot.site);
  std::erase(delayed_, &slot);
  any_delayed_.store(!delayed_.empty(), std::memory_order_relaxed);
  slot.state = Slot::State::here;
  // Sources that autograd no longer needs are freed at once: no copy reads them. Others were marked since their group ended.
  std::erase_if(slot.sources, [](const std::shared_ptr<SavedStorage>& saved) {
    if (!saved->to_offload) {
      saved->lease.reset();
    }
    return !saved->to_offload || saved.use_count() == 1;
  });
  if (!slot.sources.empty()) {
    send(slot);
  }
}

void EagerOffload::keep_delayed(Slot& slot) noexcept {
  std::erase(delayed_, &slot);
  any_delayed_.store(!delayed_.empty(), std::memory_order_relaxed);
  slot.keep_sources();
  slot.state = Slot::State::here;
}

}  // namespace sidestream
