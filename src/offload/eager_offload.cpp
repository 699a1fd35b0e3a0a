#include "offload/eager_offload.h"

#include <algorithm>

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "base/site.h"
#include "memory/storage_view.h"
#include "sidestream/error.h"

namespace sidestream {

namespace {

/// The memory of `storage` is not lent again before what `streams` have queued by then is done.
void keep_for(const c10::Storage& storage, const Streams& streams) {
  if (streams.size() > 1 && storage) {
    const auto* guard = c10::impl::getDeviceGuardImpl(storage.device_type());
    for (const c10::Stream stream : streams) {
      guard->recordDataPtrOnStream(storage.data_ptr(), stream);
    }
  }
}

}  // namespace

// Note [Eager choreography]
// M is the stream that operators saved on (autograd runs their backward on the same), D and H are the copy streams, g a group.
//
//   scope of g ends      M: record fork     D: wait fork, wait the host slots' last copies, copy g, record offloaded(g)
//   groups_in_flight on  M: wait offloaded(g), then g's sources are let go: M may use their memory again
//   backward reaches g+1 M: allocate g, record fork   H: wait fork, copy g, record reloaded(g)
//   backward reaches g   M: wait reloaded(g), unpack; and the line above for the group before g
//   the step ends        M and the current stream: wait for D and H; what came back unused is let go
//
// A destination is allocated on M before the fork is recorded, so that H is behind whatever used that memory before. H is
// behind the D2H through the same fork: only what was let go comes back, and M waited for offloaded(g) first. The wait for a host
// slot's last copy is for models on several streams: a group saved on one stream may leave into a slot that the H2D of another
// stream's group still reads.
//
// Where a step saves on several streams, each is an M: D and H fork from all that saved of g. The first of them waits for
// offloaded(g); for the others the allocator is told of every stream that has saved in the step, as autograd alone would hold a
// saved tensor until backward and any of them could read it until then. So its memory is lent again only behind all of
// them, and with the first behind the copy. A reloaded copy is read by backward, on the streams that saved it.

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
  immediate_.clear();
  step_streams_.clear();
  (void)end_sizing_step();
  for (std::size_t i = 0; i < used_slots_; ++i) {
    for (const auto& weak : slots_[i].storages) {
      if (!weak.expired()) {
        return;  // a backward of an earlier step is pending: its slots keep their places
      }
    }
  }
  used_slots_ = 0;
}

void EagerOffload::begin_sizing_step(std::function<void(std::int64_t)> backward_begins) {
  const std::lock_guard lock(mutex_);
  begin_step();
  backward_begins_ = std::move(backward_begins);
  unoffloaded_ = std::make_unique<UnoffloadedPeak>(*runtime_);
}

std::unique_ptr<UnoffloadedPeak> EagerOffload::end_sizing_step() noexcept {
  const std::lock_guard lock(mutex_);
  backward_begins_ = nullptr;
  std::unique_ptr<UnoffloadedPeak> ended = std::move(unoffloaded_ != nullptr ? unoffloaded_ : ended_);
  ended_.reset();
  return ended;
}

void EagerOffload::saved_or_released() {
  const std::lock_guard lock(mutex_);
  look();
}

void EagerOffload::look() {
  if (!unoffloaded_) {
    return;
  }
  std::size_t only_copies = 0;
  for (const auto& [slot, storages] : stash_) {
    for (const auto& saved : storages) {
      only_copies += saved.use_count() == 1 && saved->device.use_count() == 1 ? saved->bytes : 0;
    }
  }
  for (const c10::Storage& storage : dropped_) {
    only_copies += storage.nbytes();
  }
  unoffloaded_->look(static_cast<std::int64_t>(only_copies));
}

EagerOffload::Slot& EagerOffload::next_slot() {
  if (used_slots_ == slots_.size()) {
    auto offloaded = std::make_shared<Event>(runtime_->create_event());
    auto reloaded = std::make_shared<Event>(runtime_->create_event());
    Slot& slot = slots_.emplace_back();
    slot.offloaded = std::move(offloaded);
    slot.reloaded = std::move(reloaded);
  }
  Slot& slot = slots_[used_slots_++];
  slot.storages.clear();
  slot.savers.clear();
  slot.arrived.clear();
  slot.reloading = slot.used = false;
  return slot;
}

EagerOffload::Slot* EagerOffload::slot_of(const SavedStorage& storage) {
  return storage.slot == 0 || storage.slot > slots_.size() ? nullptr : &slots_[storage.slot - 1];
}

std::vector<std::shared_ptr<SavedStorage>> EagerOffload::leases_for(Group& group) {
  std::vector<std::shared_ptr<SavedStorage>> leaving;
  for (const auto& weak : group.storages) {
    auto saved = weak.lock();
    if (saved == nullptr || !saved->to_offload || saved->place != SavedStorage::Place::device) {
      continue;
    }
    try {
      saved->lease = arena_->lease(saved->bytes);
    } catch (const DeviceError&) {  // while no plan has pinned, leases do: what the system refuses stays
    }
    if (saved->lease) {
      leaving.push_back(std::move(saved));
    } else {
      saved->to_offload = false;
      group.refused_bytes += saved->bytes;
      ++counts_.refused_leases;
    }
  }
  return leaving;
}

void EagerOffload::group_ended(Group& group) {
  const std::lock_guard lock(mutex_);
  immediate_.ended(group);
  std::vector<std::shared_ptr<SavedStorage>> leaving = leases_for(group);
  if (leaving.empty()) {
    return;
  }
  const Site site(Activity::offload, group.scope->site);
  Slot& slot = next_slot();
  slot.site = group.scope->site;
  for (const auto& saved : leaving) {
    for (const c10::Stream stream : saved->streams) {
      add_stream(slot.savers, stream);
      add_stream(step_streams_, stream);
    }
  }
  try {
    fork(to_host_, slot.savers);
    for (const auto& saved : leaving) {
      saved->lease.wait_before_use(to_host_);
      runtime_->copy_to_host(saved->lease.data(), saved->device.data(), saved->bytes, to_host_);
    }
    runtime_->record(*slot.offloaded, to_host_);
  } catch (...) {
    settle(to_host_);  // nothing tells when copies that were queued are done
    for (const auto& saved : leaving) {
      saved->lease.reset();
      saved->to_offload = false;
    }
    throw;
  }
  for (const auto& saved : leaving) {
    saved->lease.record_last_use(slot.offloaded);
    saved->place = SavedStorage::Place::leaving;
    saved->slot = static_cast<std::uint32_t>(used_slots_);
    slot.storages.push_back(saved);
    counts_.offloaded_bytes += saved->bytes;
  }
  stash_.emplace_back(&slot, std::move(leaving));
  while (stash_.size() > groups_in_flight_) {
    let_go_of_oldest();
  }
}

void EagerOffload::settle(const OwnedStream& copies) noexcept {
  try {
    runtime_->synchronize(copies);
  } catch (const std::exception&) {  // the device has failed: nothing runs any more
  }
}

void EagerOffload::fork(const OwnedStream& copies, const Streams& savers) {
  for (const c10::Stream stream : savers) {
    runtime_->record(fork_, stream);
    runtime_->wait(copies, fork_);
  }
}

void EagerOffload::let_go_of_oldest() {
  runtime_->wait(stash_.front().first->savers.front(), *stash_.front().first->offloaded);
  ++counts_.waits;
  drop_sources();
}

void EagerOffload::drop_sources() {
  const auto [slot, storages] = std::move(stash_.front());
  stash_.pop_front();
  for (const auto& saved : storages) {
    keep_for(saved->device, step_streams_);
    if (saved->place == SavedStorage::Place::leaving) {
      if (unoffloaded_ && saved.use_count() > 1) {  // else nobody needs it any more
        unoffloaded_->lets_go(*saved);
      }
      saved->device = c10::Storage();
      saved->place = SavedStorage::Place::host;
    }
  }
  look();
}

void EagerOffload::reload(Slot& slot) {
  const Site site(Activity::reload, slot.site);
  std::vector<std::shared_ptr<SavedStorage>> returning;
  if (unoffloaded_) {
    unoffloaded_->return_begins();
  }
  slot.reloading = true;
  try {
    for (const auto& weak : slot.storages) {
      if (auto saved = weak.lock(); saved != nullptr && saved->place == SavedStorage::Place::host) {
        const StreamGuard on_saver(*runtime_, saved->streams.front());
        saved->device = allocate_storage(runtime_->device(), saved->bytes);
        returning.push_back(std::move(saved));
      }
    }
    fork(to_device_, slot.savers);
    for (const auto& saved : returning) {
      runtime_->copy_to_device(saved->device.mutable_data(), saved->lease.data(), saved->bytes, to_device_);
    }
    runtime_->record(*slot.reloaded, to_device_);
  } catch (...) {
    settle(to_device_);
    for (const auto& saved : returning) {
      saved->device = c10::Storage();
    }
    slot.reloading = false;
    throw;
  }
  for (const auto& saved : returning) {
    saved->lease.record_last_use(slot.reloaded);
    saved->place = SavedStorage::Place::returning;
    if (unoffloaded_) {
      unoffloaded_->came_back(*saved);
    }
    counts_.reloaded_bytes += saved->bytes;
  }
}

void EagerOffload::await_arrival(Slot& slot, c10::Stream stream) {
  if (std::find(slot.arrived.begin(), slot.arrived.end(), stream) == slot.arrived.end()) {
    runtime_->wait(stream, *slot.reloaded);
    ++counts_.waits;
    slot.arrived.push_back(stream);
  }
}

c10::Storage EagerOffload::fetch(SavedStorage& storage) {
  const std::lock_guard lock(mutex_);
  immediate_.asked();
  look();
  if (const auto backward_begins = std::exchange(backward_begins_, nullptr); backward_begins && unoffloaded_) {
    backward_begins(unoffloaded_->away());
  }
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
  }
  if (storage.place == SavedStorage::Place::returning) {
    await_arrival(*slot, runtime_->current_stream());
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
  if (storage.place != SavedStorage::Place::returning && storage.place != SavedStorage::Place::host) {
    return;
  }
  const std::lock_guard lock(mutex_);
  if (storage.place == SavedStorage::Place::returning) {
    keep_for(storage.device, storage.streams);
    Slot* slot = slot_of(storage);
    if (slot != nullptr &&
        std::find(slot->arrived.begin(), slot->arrived.end(), storage.streams.front()) == slot->arrived.end()) {
      dropped_.push_back(std::move(storage.device));
      add_stream(step_streams_, storage.streams.front());
    }
  }
  if (unoffloaded_) {
    storage.device = c10::Storage();
    unoffloaded_->dropped(storage);
  }
}

void EagerOffload::end_step() {
  std::deque<std::pair<Slot*, std::vector<std::shared_ptr<SavedStorage>>>> done;
  const std::lock_guard lock(mutex_);
  if (used_slots_ == 0 && dropped_.empty()) {
    return;
  }
  look();
  if (unoffloaded_) {  // what goes from here on is needed by nobody, but for what the program still holds
    ended_ = std::move(unoffloaded_);
  }
  try {
    while (!stash_.empty()) {
      done.push_back(stash_.front());
      let_go_of_oldest();
    }
    add_stream(step_streams_, runtime_->current_stream());
    for (const OwnedStream* copies : {&to_host_, &to_device_}) {
      runtime_->record(fork_, *copies);
      for (const c10::Stream stream : step_streams_) {
        runtime_->wait(stream, fork_);
      }
    }
  } catch (...) {
    settle(to_host_);
    settle(to_device_);
    while (!stash_.empty()) {
      done.push_back(stash_.front());
      drop_sources();
    }
    dropped_.clear();
    throw;
  }
  dropped_.clear();
}

EagerOffload::Counts EagerOffload::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

}  // namespace sidestream
