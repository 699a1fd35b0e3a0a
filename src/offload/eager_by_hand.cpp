// The part of EagerOffload that does what programs ask for. See Note [Eager choreography] in eager_offload.cpp.
#include "base/site.h"
#include "offload/eager_offload.h"
#include "offload/kept_memory.h"
#include "runtime/named_streams.h"

namespace sidestream {

void EagerOffload::start_offload(const Group& group) {
  const std::lock_guard lock(mutex_);
  Slot* const slot = slot_of(group.slot);
  if (slot != nullptr && slot->state == Slot::State::delayed) {
    send_delayed(*slot);
  }
}

void EagerOffload::finish_offload(const Group& group) {
  const std::lock_guard lock(mutex_);
  Slot* const slot = slot_of(group.slot);
  if (slot != nullptr && (slot->state == Slot::State::delayed || slot->state == Slot::State::offloading)) {
    const Site site(Activity::offload, slot->site);
    free_sources_of(*slot);
  }
}

void EagerOffload::start_reload(const Group& group) {
  const std::lock_guard lock(mutex_);
  Slot* const slot = slot_of(group.slot);
  if (slot != nullptr && slot->state == Slot::State::delayed) {
    keep_delayed(*slot);
  } else if (slot != nullptr && slot->state == Slot::State::away) {
    reload(*slot);
  }
}

c10::Storage EagerOffload::release(const c10::Storage& storage,
                                   const std::vector<std::shared_ptr<SavedStorage>>& holders,
                                   const std::string& message) {
  const std::lock_guard lock(mutex_);
  c10::StorageImpl& from = *storage.unsafeGetStorageImpl();
  const c10::Device device = from.device();
  at::DataPtr taken = std::move(from._mutable_data_ptr_no_checks());
  from.set_data_ptr_noswap(at::DataPtr(nullptr, device));
  const c10::Storage memory(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), from.nbytes(), std::move(taken), from.allocator(), from.resizable()));
  from.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  for (const c10::Stream stream : named_streams::of(storage)) {
    named_streams::add(memory, stream);
  }
  for (const auto& saved : holders) {
    if (saved->device.unsafeGetStorageImpl() == &from) {
      saved->device = memory;
    }
  }
  keep_for(memory, step_streams_);  // if its copy is done, no holder may be left
  return memory;
}

ReadyMark EagerOffload::mark_ready(const c10::Storage& storage) {
  const std::lock_guard lock(mutex_);
  if (used_ready_ == ready_.size()) {
    ready_.push_back(std::make_shared<Event>(runtime_->create_event()));
  }
  const std::shared_ptr<Event>& ready = ready_[used_ready_++];
  runtime_->record(*ready, runtime_->current_stream());
  return {ready, storage.data()};
}

}  // namespace sidestream
