#include "offload/capture_offload.h"

#include <string>
#include <utility>

#include "base/site.h"
#include "memory/storage_view.h"
#include "sidestream/error.h"

namespace sidestream {

CaptureOffload::CaptureOffload(std::shared_ptr<Runtime> runtime, std::shared_ptr<GroupMover> mover)
    : runtime_(std::move(runtime)), mover_(std::move(mover)) {}

void CaptureOffload::group_ended(Group& group) {
  const Site site(Activity::offload, group.scope->site);
  std::vector<std::shared_ptr<SavedStorage>> offloaded;
  mover_->lease(group, offloaded, &places_);
  if (offloaded.empty()) {
    return;
  }
  Streams savers;
  for (const auto& saved : offloaded) {
    for (const c10::Stream stream : saved->streams) {
      add_stream(savers, stream);
    }
  }
  CapturedCopies::Group& noted = copies_->groups.emplace_back();
  noted.site = group.scope->site;
  for (const c10::Stream stream : savers) {  // more than one if the callable forks streams of its own
    noted.ready.push_back(runtime_->create_external_event());
    runtime_->record(noted.ready.back(), stream);
  }
  for (auto& saved : offloaded) {
    add_copies(*saved);
    copies_->bytes += saved->bytes;
    copies_->for_weights += saved->for_weights ? saved->bytes : 0;
    saved->place = SavedStorage::Place::offloading;
    copies_->storages.push_back(std::move(saved));
  }
  noted.end = copies_->copies.size();
}

void CaptureOffload::add_copies(const SavedStorage& saved) {
  const auto* const source = static_cast<const std::byte*>(saved.device.data());
  const std::size_t storage = copies_->storages.size();
  if (saved.lease) {
    copies_->copies.push_back({saved.lease.data(), source, nullptr, saved.bytes, storage, 0, saved.for_weights});
  }
  std::size_t at = 0;
  for (const SharedSlots::Part& part : saved.parts) {
    copies_->copies.push_back({part.data, source + at, nullptr, part.bytes, storage, at, saved.for_weights});
    at += part.bytes;
  }
}

namespace {

void release_one(SavedStorage& saved) {
  saved.device = c10::Storage();
  saved.place = SavedStorage::Place::host;
}

}  // namespace

void CaptureOffload::release(const CapturedCopies& copies) {
  for (const auto& saved : copies.storages) {
    release_one(*saved);
  }
}

void CaptureOffload::release_unused(const CapturedCopies& copies) {
  for (const auto& saved : copies.storages) {
    if (saved.use_count() == 1) {
      release_one(*saved);
    }
  }
}

void CaptureOffload::allocate_targets(CapturedCopies& copies, bool for_weights) const {
  for (const auto& saved : copies.storages) {
    if (saved->for_weights == for_weights) {
      saved->device = allocate_storage(runtime_->device(), saved->bytes);
      saved->place = SavedStorage::Place::reloading;
    }
  }
  for (CapturedCopy& copy : copies.copies) {
    if (copy.for_weights == for_weights) {
      copy.target = static_cast<std::byte*>(copies.storages[copy.storage]->device.mutable_data()) + copy.at;
    }
  }
}

c10::Storage CaptureOffload::fetch(SavedStorage& storage) {
  if (!storage.device &&
      storage.for_weights) {  // LibTorch's nodes unpack all that they saved, also what they do not read
    return storage_without_memory(runtime_->device(), storage.bytes,
                                  "a backward reads a saved tensor that it did not read in the sizing pass; let the "
                                  "callable do the same work each time");
  }
  if (!storage.device) {
    throw CaptureError("backward needs a storage of group \"" +
                       (storage.group == nullptr ? std::string("?") : storage.group->scope->name) +
                       "\" that is not on the device: its reload does not come before this backward in the order");
  }
  return storage.device;
}

}  // namespace sidestream
