// The part of SavedTensorRecorder that serves what programs say about their groups by hand.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "offload/eager_offload.h"
#include "offload/saved_tensor_recorder.h"
#include "runtime/composite.h"
#include "runtime/replayed_memory.h"
#include "sidestream/error.h"

namespace sidestream {

EagerOffload& SavedTensorRecorder::by_hand(const char* function) const {
  const SavedTensorRecorder* const current = current_recorder();
  EagerOffload* const eager = mover_->by_hand();
  if (current != nullptr && current != this && current->mover_->by_hand() != nullptr && !current->to_be_captured_) {
    throw UsageError(std::string(function) +
                     " was called while a step of another engine is active on this thread; end that step first");
  }
  if (eager == nullptr || to_be_captured_ || (current != nullptr && current != this)) {
    const std::string& inside = (current == nullptr ? *this : *current).scope().name;
    throw UsageError(std::string(function) + " was called in \"" + inside +
                     "\", inside of a call that is captured; replays do not run it. Call it outside of graphed calls: "
                     "what they save is copied beside their graphs");
  }
  return *eager;
}

void SavedTensorRecorder::mark(const at::Tensor& tensor) {
  exclusions_.mark(tensor);
  // The operator that made it may have saved it already; its group was not offloaded yet while its scope is open.
  for_each_part(tensor, [this](const at::Tensor& part) {
    const auto found =
        StorageView::supported(part) ? entries_.find(part.storage().unsafeGetStorageImpl()) : entries_.end();
    if (found == entries_.end()) {
      return;
    }
    for (const std::size_t record : records_of(found->second, part.storage())) {
      const auto saved = identities_[record].saved.lock();
      if (saved != nullptr && saved->place == SavedStorage::Place::device) {
        saved->to_offload = false;
        storages_[record].marked = true;
      }
    }
  });
}

c10::SmallVector<std::size_t, 2> SavedTensorRecorder::records_of(const Entry& latest,
                                                                 const c10::Storage& storage) const {
  if (counts_.copied_twice_bytes == 0) {
    return {latest.profile_index};
  }
  c10::SmallVector<std::size_t, 2> records;
  for (std::size_t i = 0; i < identities_.size(); ++i) {
    if (i == latest.profile_index || identities_[i].storage._unsafe_get_target() == storage.unsafeGetStorageImpl()) {
      records.push_back(i);
    }
  }
  return records;
}

void SavedTensorRecorder::mark_ready(const at::Tensor& tensor) {
  EagerOffload& eager = by_hand("mark_ready");
  if (exclusions_.classify(tensor) != Exclusion::none) {
    return;
  }
  const c10::StorageImpl* const key = tensor.storage().unsafeGetStorageImpl();
  const VersionStamp version(tensor);
  const auto found = entries_.find(key);
  const auto saved = found == entries_.end() ? nullptr : found->second.saved.lock();
  if (saved == nullptr || !found->second.version.same_as(version)) {
    ready_.insert_or_assign(
        key, RecorderBooks::Ready{tensor.storage().getWeakStorageImpl(), version, eager.mark_ready(tensor.storage())});
  } else if (!saved->group->ended && saved->ready.event == nullptr) {
    saved->ready = eager.mark_ready(tensor.storage());
  }
}

void SavedTensorRecorder::release(const at::Tensor& tensor, const Group* groups) {
  EagerOffload& eager = by_hand("OffloadScope::release");
  const auto refuse = [&](const std::string& why) { throw UsageError("OffloadScope::release: the tensor " + why); };
  if (is_composite(tensor)) {
    refuse("is sparse, nested or quantised, and only plain tensors can be released; drop the tensor instead");
  }
  const bool has_storage = tensor.defined() && tensor.has_storage();
  const auto found = has_storage ? entries_.find(tensor.storage().unsafeGetStorageImpl()) : entries_.end();
  const auto saved = found == entries_.end() ? nullptr : found->second.saved.lock();
  if (saved == nullptr) {
    const Exclusion reason = exclusions_.classify(tensor);
    refuse("is in no group of this step: " +
           (reason == Exclusion::none
                ? std::string("autograd did not save it inside of the step, or no longer needs it")
                : "it stays on the device (" + std::string(exclusion_name(reason)) + ")") +
           "; release tensors that the scope's operators saved for their backward");
  }
  if (saved->released) {
    return;
  }
  const Group* of = groups;
  while (of != nullptr && of != saved->group) {
    of = of->next_tagged;
  }
  const std::string& name = saved->group->scope->name;
  if (of == nullptr) {
    refuse("is in the group \"" + name + "\", which saved it first; release it with the handle of that scope");
  }
  const c10::Storage& storage = tensor.storage();
  if (ReplayedMemory::of(storage.data_ptr()) != nullptr) {
    refuse("lies in memory that a graph writes at each replay, which the graph keeps; drop the tensor instead");
  }
  if (!storage.resizable()) {
    refuse(
        "lies in memory of a TensorPool, or in other memory that LibTorch did not allocate, and that owner keeps it; "
        "free the tensor there instead");
  }
  const auto records = records_of(found->second, storage);
  std::vector<std::shared_ptr<SavedStorage>> holders;
  for (const std::size_t record : records) {
    if (auto holder = identities_[record].saved.lock()) {
      holders.push_back(std::move(holder));
    }
  }
  const c10::Storage memory =
      eager.release(storage, holders,
                    "this tensor was released by the group \"" + name +
                        "\" (OffloadScope::release), so its memory belongs to autograd alone; read it before that, or "
                        "do not release it");
  for (const std::size_t record : records) {
    identities_[record].storage = memory.getWeakStorageImpl();
  }
  saved->released = true;
}

}  // namespace sidestream
