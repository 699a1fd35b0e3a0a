// The part of EagerOffload that reloads groups: see Note [Eager choreography] in eager_offload.cpp.
#include <algorithm>

#include <c10/util/ScopeExit.h>

#include "base/site.h"
#include "memory/storage_view.h"
#include "offload/eager_offload.h"
#include "offload/kept_memory.h"

namespace sidestream {

c10::Storage EagerOffload::allocate(std::size_t bytes) { return allocate_storage(runtime_->device(), bytes); }

void EagerOffload::reload(Slot& slot) {
  const Site site(Activity::reload, slot.site);
  const StepTrace::InChunk in_chunk(mover_->trace(), slot.chunk);
  const auto without_reloading = c10::make_scope_exit([&] { reloading_.clear(); });
  copied_ = true;
  try {
    for (const auto& weak : slot.storages) {
      if (auto saved = weak.lock(); saved != nullptr && saved->place == SavedStorage::Place::host) {
        const StreamGuard on_saver(*runtime_, saved->streams.front());
        saved->device = allocate(saved->bytes);
        reloading_.push_back(std::move(saved));
      }
    }
    GroupMover::Copies copies = mover_->reload_copies();
    copies.wait_for(slot.savers);
    for (const auto& saved : reloading_) {
      copies.to_device(saved->device.mutable_data(), saved->lease.data(), saved->bytes);
    }
    copies.record(*slot.reloaded);
    copies.finish();
  } catch (...) {
    for (const auto& saved : reloading_) {
      saved->device = c10::Storage();
    }
    throw;
  }
  slot.state = Slot::State::reloaded;
  std::size_t bytes = 0;
  for (const auto& saved : reloading_) {
    saved->lease.record_last_use(slot.reloaded);
    saved->place = SavedStorage::Place::reloading;
    bytes += saved->bytes;
  }
  set_in_flight(slot, static_cast<std::int64_t>(bytes));
  look();
  trace_memory();
}

void EagerOffload::await_arrival(Slot& slot, c10::Stream stream) {
  if (std::find(slot.arrived.begin(), slot.arrived.end(), stream) == slot.arrived.end()) {
    const StepTrace::InChunk in_chunk(mover_->trace(), slot.chunk);
    mover_->await(stream, *slot.reloaded, slot.site.text().c_str());
    slot.arrived.push_back(stream);
  }
}

c10::Storage EagerOffload::fetch(SavedStorage& storage) {
  const std::lock_guard lock(mutex_);
  look();
  if (const auto backward_begins = std::exchange(backward_begins_, nullptr); backward_begins && sizing_) {
    backward_begins(sizing_->away());
  }
  Slot* slot = slot_of(storage.slot);
  if (slot == nullptr) {
    if (!order_.follows()) {
      prefetch_before(used_slots_);
    }
    return storage.device;
  }
  if (storage.place == SavedStorage::Place::host) {
    mover_->count_inline_reload();
    if (slot->state == Slot::State::offloading) {
      free_sources_of(*slot);
    }
    reload(*slot);
  }
  if (storage.place == SavedStorage::Place::reloading) {
    const c10::Stream reader = runtime_->current_stream();
    await_arrival(*slot, reader);
    add_stream(storage.streams, reader);
  }
  if (!slot->used) {
    use(storage.slot - 1);
  }
  return storage.device;
}

void EagerOffload::use(std::size_t number) {
  Slot& slot = slots_[number];
  trace_memory();
  free_used_sources();
  slot.used = true;
  set_in_flight(slot, 0);
  if (slot.state == Slot::State::delayed) {
    keep_delayed(slot);
  }
  if (slot.state == Slot::State::here) {  // it was needed immediately
    const auto is_it = [&](const Trailing& trailing) { return trailing.slot == &slot; };
    if (const auto found = std::find_if(trailing_.begin(), trailing_.end(), is_it); found != trailing_.end()) {
      trailing_bytes_ -= found->bytes;
      trailing_.erase(found);
    }
  }
  if (number < first_slot_) {
    order_.depart();
  } else {
    order_.used(static_cast<std::uint32_t>(number - first_slot_));
  }
  if (order_.follows()) {
    reload_due();
  } else {
    prefetch_before(number);
  }
}

void EagerOffload::reload_due() {
  while (const GroupReload* const due = order_.due()) {
    Slot& slot = slots_[first_slot_ + due->group];
    if (slot.state == Slot::State::away) {
      reload(slot);
    }
  }
}

void EagerOffload::prefetch_before(std::size_t limit) {
  // One group ahead: backward needs next the group that was offloaded last and is not reloaded yet.
  while (limit-- > 0) {
    Slot& slot = slots_[limit];
    if (slot.used || slot.state == Slot::State::here || slot.is_gone()) {
      continue;
    }
    if (slot.state == Slot::State::away) {
      reload(slot);
    }
    return;
  }
}

void EagerOffload::dropped(SavedStorage& storage) noexcept {
  if (storage.place == SavedStorage::Place::device || storage.place == SavedStorage::Place::offloading) {
    return;
  }
  const std::lock_guard lock(mutex_);
  if (storage.place == SavedStorage::Place::reloading) {
    if (storage.streams.size() > 1) {  // allocated on the first of them
      keep_for(storage.device, storage.streams);
    }
    Slot* slot = slot_of(storage.slot);
    if (slot != nullptr &&
        std::find(slot->arrived.begin(), slot->arrived.end(), storage.streams.front()) == slot->arrived.end()) {
      dropped_.push_back(std::move(storage.device));
      add_stream(step_streams_, storage.streams.front());
    }
  }
}

}  // namespace sidestream
