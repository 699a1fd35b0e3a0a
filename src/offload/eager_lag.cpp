// The part of EagerOffload that frees sources after their copies. See Note [Eager choreography] in eager_offload.cpp.
#include <algorithm>
#include <memory>

#include <c10/util/ScopeExit.h>

#include "offload/eager_offload.h"
#include "offload/kept_memory.h"
#include "runtime/named_streams.h"

namespace sidestream {

void EagerOffload::trail(Slot& slot, std::uint64_t bytes) {
  if (!planned_window_ && bytes > largest_.back()) {
    largest_ = {std::max(largest_.front(), bytes), std::min(largest_.front(), bytes)};
    window_ = limits_.for_unplanned_groups(largest_);
  }
  if (bytes == 0) {
    return;
  }
  trailing_.push_back({&slot, bytes});
  trailing_bytes_ += bytes;
  while (!trailing_.empty() && (trailing_bytes_ > window_.lag || trailing_.size() > window_.in_flight)) {
    free_oldest();
  }
}

void EagerOffload::free_oldest() {
  Slot& slot = *trailing_.front().slot;
  if (slot.state == Slot::State::delayed) {
    send_delayed(slot);
  }
  if (slot.state == Slot::State::offloading) {
    mover_->await(slot.savers.front(), *slot.offloaded);
  }
  drop_sources();
}

void EagerOffload::free_sources_of(const Slot& slot) {
  const auto is_it = [&](const Trailing& trailing) { return trailing.slot == &slot; };
  const auto found = std::find_if(trailing_.begin(), trailing_.end(), is_it);
  if (found != trailing_.end()) {
    std::rotate(trailing_.begin(), found, found + 1);
    free_oldest();
  }
}

void EagerOffload::free_used_sources() {
  for (std::size_t i = 0; i < trailing_.size();) {
    const Slot& slot = *trailing_[i].slot;
    const auto is_used_up = [](const std::shared_ptr<SavedStorage>& source) { return source.use_count() == 1; };
    if (slot.used && slot.state == Slot::State::offloading &&
        std::all_of(slot.sources.begin(), slot.sources.end(), is_used_up)) {
      free_sources_of(slot);
    } else {
      ++i;
    }
  }
}

void EagerOffload::free_on_device(const std::shared_ptr<SavedStorage>& saved) {
  keep_for(saved->device, step_streams_);
  if (saved->place == SavedStorage::Place::offloading) {
    if (sizing_) {
      sizing_->released(saved);
    }
    for (const c10::Stream stream : named_streams::of(saved->device)) {  // for its reload, which is other memory
      add_stream(saved->streams, stream);
    }
    saved->device = c10::Storage();
    saved->place = SavedStorage::Place::host;
  }
}

void EagerOffload::drop_sources() {
  Slot& slot = *trailing_.front().slot;
  const auto without_sources = c10::make_scope_exit([&] { slot.sources.clear(); });
  trailing_bytes_ -= trailing_.front().bytes;
  trailing_.erase(trailing_.begin());
  if (slot.state == Slot::State::offloading) {
    slot.state = Slot::State::away;
  }
  for (const auto& saved : slot.sources) {
    free_on_device(saved);
  }
  set_in_flight(slot, 0);
}

}  // namespace sidestream
