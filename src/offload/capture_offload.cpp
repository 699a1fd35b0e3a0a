#include "offload/capture_offload.h"

#include "base/site.h"
#include "memory/storage_view.h"
#include "sidestream/error.h"

namespace sidestream {

CaptureOffload::CaptureOffload(std::shared_ptr<Runtime> runtime, std::shared_ptr<HostArena> arena, c10::Stream capture)
    : runtime_(std::move(runtime)),
      arena_(std::move(arena)),
      capture_(capture),
      to_host_(runtime_->create_stream()),
      to_device_(runtime_->create_stream()),
      fork_(runtime_->create_event()),
      join_(runtime_->create_event()) {}

CaptureOffload::~CaptureOffload() = default;

void CaptureOffload::fork(const OwnedStream& copies, c10::Stream from) {
  runtime_->record(fork_, from);
  runtime_->wait(copies, fork_);
}

void CaptureOffload::join(const OwnedStream& copies) {
  runtime_->record(join_, copies);
  runtime_->wait(capture_, join_);
}

void CaptureOffload::begin_forward(OffloadedStorages& offloaded) {
  offloaded_ = &offloaded;
  copies_to_host_ = false;
}

void CaptureOffload::group_ended(Group& group) {
  OffloadedStorages leaving;
  for (const auto& weak : group.storages) {
    auto saved = weak.lock();
    if (saved == nullptr || !saved->to_offload) {
      continue;
    }
    saved->lease = arena_->lease(saved->bytes);
    if (saved->lease) {
      leaving.push_back(std::move(saved));
    } else {
      saved->to_offload = false;
      group.refused_bytes += saved->bytes;
    }
  }
  if (leaving.empty()) {
    return;
  }
  const Site site(Activity::offload, group.scope->site);
  Streams savers;
  for (const auto& saved : leaving) {
    for (const c10::Stream stream : saved->streams) {
      add_stream(savers, stream);
    }
  }
  for (const c10::Stream stream : savers) {  // more than one where the callable forks streams of its own
    fork(to_host_, stream);
  }
  for (auto& saved : leaving) {
    runtime_->copy_to_host(saved->lease.data(), saved->device.data(), saved->bytes, to_host_);
    saved->place = SavedStorage::Place::leaving;
    offloaded_->push_back(std::move(saved));
  }
  copies_to_host_ = true;
}

void CaptureOffload::join_forward() {
  if (copies_to_host_) {
    join(to_host_);
  }
  offloaded_ = nullptr;
}

void CaptureOffload::release(const OffloadedStorages& offloaded) {
  for (const auto& saved : offloaded) {
    saved->device = c10::Storage();
    saved->place = SavedStorage::Place::host;
  }
}

void CaptureOffload::prefetch(const OffloadedStorages& offloaded, const SiteName& name) {
  copies_to_device_ = !offloaded.empty();
  if (offloaded.empty()) {
    return;
  }
  const Site site(Activity::reload, name);
  for (const auto& saved : offloaded) {
    saved->device = allocate_storage(runtime_->device(), saved->bytes);
  }
  fork(to_device_, capture_);
  for (const auto& saved : offloaded) {
    runtime_->copy_to_device(saved->device.mutable_data(), saved->lease.data(), saved->bytes, to_device_);
    saved->place = SavedStorage::Place::returning;
  }
}

void CaptureOffload::join_prefetch() {
  if (copies_to_device_) {
    join(to_device_);
    copies_to_device_ = false;
  }
}

void CaptureOffload::abandon() noexcept {
  offloaded_ = nullptr;
  copies_to_host_ = copies_to_device_ = false;
}

c10::Storage CaptureOffload::fetch(SavedStorage& storage) {
  if (!storage.device) {
    throw CaptureError("backward needs a storage of group \"" +
                       (storage.group == nullptr ? std::string("?") : storage.group->scope->name) +
                       "\" that is not on the device: its layer was not captured in the reverse order of the forwards");
  }
  return storage.device;
}

}  // namespace sidestream
