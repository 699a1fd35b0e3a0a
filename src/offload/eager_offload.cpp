#include "offload/eager_offload.h"

#include <algorithm>

#include "base/tracing.h"
#include "memory/storage_view.h"

namespace sidestream {

// Note [Eager choreography]
// M is the stream that the model runs on, D and H are the copy streams, g a group.
//
//   scope of g ends      M: record fork     D: wait fork, wait the slots' last copies, copy g, record left(g)
//   groups_in_flight on  M: wait left(g), then g's sources are let go: M may use their memory again
//   backward reaches g+1 M: allocate g, record fork   H: wait fork, wait left(g), copy g, record returned(g)
//   backward reaches g   M: wait returned(g), unpack; and the line above for the group before g
//
// A destination is allocated on M before the fork is recorded, so that H is behind whatever used that memory before.

EagerOffload::EagerOffload(std::shared_ptr<Runtime> runtime, std::shared_ptr<HostArena> arena,
                           std::size_t groups_in_flight)
    : runtime_(std::move(runtime)),
      arena_(std::move(arena)),
      groups_in_flight_(groups_in_flight),
      to_host_(runtime_->create_stream()),
      to_device_(runtime_->create_stream()),
      fork_(runtime_->create_event()) {}

EagerOffload::~EagerOffload() {
  // The copy streams must be idle before they go; nobody can use what they carry any more.
  try {
    runtime_->synchronize(to_host_);
    runtime_->synchronize(to_device_);
  } catch (const std::exception&) {
  }
}

void EagerOffload::begin_step() {
  const std::lock_guard lock(mutex_);
  counts_ = {};
  for (std::size_t i = 0; i < used_slots_; ++i) {
    for (const auto& weak : slots_[i].storages) {
      if (!weak.expired()) {
        return;  // a backward of an earlier step is pending: its slots keep their places
      }
    }
  }
  used_slots_ = 0;
}

EagerOffload::Slot& EagerOffload::next_slot() {
  if (used_slots_ == slots_.size()) {
    Slot& slot = slots_.emplace_back();
    slot.left = std::make_shared<Event>(runtime_->create_event());
    slot.returned = std::make_shared<Event>(runtime_->create_event());
  }
  Slot& slot = slots_[used_slots_++];
  slot.storages.clear();
  slot.reloading = slot.arrived = slot.used = false;
  return slot;
}

EagerOffload::Slot* EagerOffload::slot_of(const SavedStorage& storage) {
  return storage.slot == 0 || storage.slot > slots_.size() ? nullptr : &slots_[storage.slot - 1];
}

void EagerOffload::group_ended(Group& group) {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<SavedStorage>> leaving;
  for (const auto& weak : group.storages) {
    auto saved = weak.lock();
    if (saved == nullptr || !saved->moves || saved->place != SavedStorage::Place::device) {
      continue;
    }
    saved->lease = arena_->lease(saved->bytes);
    if (saved->lease) {
      leaving.push_back(std::move(saved));
    } else {
      saved->moves = false;
      ++counts_.refused_leases;
    }
  }
  if (leaving.empty()) {
    return;
  }
  const tracing::Scope trace(tracing::Range::offload, group.scope->trace);
  Slot& slot = next_slot();
  slot.scope = group.scope;
  const c10::Stream compute = runtime_->current_stream();
  runtime_->record(fork_, compute);
  runtime_->wait(to_host_, fork_);
  for (const auto& saved : leaving) {
    saved->lease.wait_before_use(to_host_);
    runtime_->copy_to_host(saved->lease.data(), saved->device.data(), saved->bytes, to_host_);
    saved->lease.touched(slot.left);
    saved->place = SavedStorage::Place::leaving;
    saved->slot = static_cast<std::uint32_t>(used_slots_);
    slot.storages.push_back(saved);
    counts_.left_bytes += saved->bytes;
  }
  runtime_->record(*slot.left, to_host_);
  stash_.emplace_back(&slot, std::move(leaving));
  while (stash_.size() > groups_in_flight_) {
    let_go_of_oldest();
  }
}

void EagerOffload::let_go_of_oldest() {
  auto [slot, storages] = std::move(stash_.front());
  stash_.pop_front();
  runtime_->wait(runtime_->current_stream(), *slot->left);
  ++counts_.waits;
  for (const auto& saved : storages) {
    if (saved->place == SavedStorage::Place::leaving) {
      saved->device = c10::Storage();
      saved->place = SavedStorage::Place::host;
    }
  }
}

void EagerOffload::reload(Slot& slot) {
  const tracing::Scope trace(tracing::Range::reload, slot.scope->trace);
  slot.reloading = true;
  const c10::Stream compute = runtime_->current_stream();
  std::vector<std::shared_ptr<SavedStorage>> returning;
  for (const auto& weak : slot.storages) {
    if (auto saved = weak.lock(); saved != nullptr && saved->place == SavedStorage::Place::host) {
      saved->device = allocate_storage(runtime_->device(), saved->bytes);
      returning.push_back(std::move(saved));
    }
  }
  runtime_->record(fork_, compute);
  runtime_->wait(to_device_, fork_);
  runtime_->wait(to_device_, *slot.left);
  for (const auto& saved : returning) {
    runtime_->copy_to_device(saved->device.mutable_data(), saved->lease.data(), saved->bytes, to_device_);
    saved->lease.touched(slot.returned);
    saved->place = SavedStorage::Place::returning;
    counts_.returned_bytes += saved->bytes;
  }
  runtime_->record(*slot.returned, to_device_);
}

void EagerOffload::await_arrival(Slot& slot) {
  if (!slot.arrived) {
    runtime_->wait(runtime_->current_stream(), *slot.returned);
    ++counts_.waits;
    slot.arrived = true;
  }
}

c10::Storage EagerOffload::fetch(SavedStorage& storage) {
  const std::lock_guard lock(mutex_);
  Slot* slot = slot_of(storage);
  if (slot == nullptr) {
    prefetch_before(used_slots_);
    return storage.device;
  }
  if (storage.place == SavedStorage::Place::host) {
    if (!slot->reloading) {
      ++counts_.inline_reloads;
    }
    reload(*slot);
    slot->arrived = false;
  }
  if (storage.place == SavedStorage::Place::returning) {
    await_arrival(*slot);
  }
  if (!slot->used) {
    slot->used = true;
    prefetch_before(storage.slot - 1);
  }
  return storage.device;
}

void EagerOffload::prefetch_before(std::size_t limit) {
  // One group ahead: backward needs next what left last and is not back yet.
  while (limit-- > 0) {
    Slot& slot = slots_[limit];
    const auto gone = [](const std::weak_ptr<SavedStorage>& weak) { return weak.expired(); };
    if (slot.used || std::all_of(slot.storages.begin(), slot.storages.end(), gone)) {
      continue;
    }
    if (!slot.reloading) {
      reload(slot);
    }
    return;
  }
}

void EagerOffload::dropped(SavedStorage& storage) noexcept {
  if (storage.place != SavedStorage::Place::returning) {
    return;
  }
  const std::lock_guard lock(mutex_);
  if (Slot* slot = slot_of(storage); slot != nullptr && !slot->arrived) {
    graveyard_.emplace_back(slot, std::move(storage.device));
  }
}

void EagerOffload::empty_graveyard() {
  for (auto& [slot, storage] : graveyard_) {
    await_arrival(*slot);
  }
  graveyard_.clear();
}

void EagerOffload::end_step() {
  std::deque<std::pair<Slot*, std::vector<std::shared_ptr<SavedStorage>>>> done;
  const std::lock_guard lock(mutex_);
  while (!stash_.empty()) {
    done.push_back(stash_.front());
    let_go_of_oldest();
  }
  empty_graveyard();
}

EagerOffload::Counts EagerOffload::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

}  // namespace sidestream
