#include "offload/group_mover.h"

#include <utility>

#include "sidestream/error.h"

namespace sidestream {

GroupMover::Copies::Copies(GroupMover& mover, Direction& direction)
    : mover_(mover), direction_(direction), lock_(direction.mutex) {}

GroupMover::Copies::~Copies() {
  if (!finished_) {
    mover_.settle(direction_);
  }
}

void GroupMover::Copies::end_span() {
  span_.end(static_cast<std::int64_t>(bytes_ - std::exchange(bytes_before_span_, bytes_)));
}

void GroupMover::Copies::wait_for(c10::Stream stream) {
  end_span();
  mover_.runtime_->record(direction_.fork, stream);
  mover_.runtime_->wait(direction_.stream, direction_.fork);
}

void GroupMover::Copies::wait_for(const Streams& streams) {
  for (const c10::Stream stream : streams) {
    wait_for(stream);
  }
}

void GroupMover::Copies::wait_for(const ExternalEvent& ready) {
  end_span();
  mover_.runtime_->wait(direction_.stream, ready);
}

void GroupMover::Copies::wait_for(const Event& ready) {
  end_span();
  mover_.runtime_->wait(direction_.stream, ready);
}

void GroupMover::Copies::wait_for(const HostArena::Lease& slot) { slot.wait_before_use(direction_.stream); }

void GroupMover::Copies::to_host(void* host, const void* device, std::size_t bytes) {
  span_.begin(*mover_.trace_, SpanKind::offload, direction_.stream);
  mover_.runtime_->copy_to_host(host, device, bytes, direction_.stream);
  bytes_ += bytes;
}

void GroupMover::Copies::to_device(void* device, const void* host, std::size_t bytes) {
  span_.begin(*mover_.trace_, SpanKind::reload, direction_.stream);
  mover_.runtime_->copy_to_device(device, host, bytes, direction_.stream);
  bytes_ += bytes;
}

void GroupMover::Copies::record(const Event& done) {
  end_span();
  mover_.runtime_->record(done, direction_.stream);
}

void GroupMover::Copies::finish() {
  end_span();
  finished_ = true;
  direction_.bytes += bytes_;
}

GroupMover::GroupMover(std::shared_ptr<Runtime> runtime, std::shared_ptr<HostArena> arena)
    : runtime_(std::move(runtime)),
      arena_(std::move(arena)),
      trace_(std::make_unique<StepTrace>(runtime_)),
      offloads_{runtime_->create_stream(), runtime_->create_event(), {}, {}},
      reloads_{runtime_->create_stream(), runtime_->create_event(), {}, {}} {}

GroupMover::~GroupMover() { settle(); }

HostPlace GroupMover::place_for(std::size_t bytes, HostPlaces* places, HostArena::Missing missing) {
  if (places != nullptr && places->former != nullptr && places->next < places->former->size() &&
      (*places->former)[places->next]->bytes == bytes) {
    const std::shared_ptr<SavedStorage>& former = (*places->former)[places->next++];
    return {
        {},
        former->lease ? SharedSlots::Parts{{{former, &former->lease}, former->lease.data(), bytes}} : former->parts};
  }
  if (places != nullptr && places->shared != nullptr) {
    return {{}, places->shared->take(bytes)};
  }
  try {
    return {arena_->lease(bytes, missing), {}};
  } catch (const DeviceError&) {  // what the system does not pin stays
    return {};
  }
}

void GroupMover::lease(Group& group, std::vector<std::shared_ptr<SavedStorage>>& offloaded, HostPlaces* places) {
  // A call that is captured with the next step is in no plan yet.
  const HostArena::Missing missing = group.to_be_captured ? HostArena::Missing::pinned : HostArena::Missing::refused;
  for (const auto& weak : group.storages) {
    auto saved = weak.lock();
    if (saved == nullptr || !saved->to_offload || saved->place != SavedStorage::Place::device) {
      continue;
    }
    if (HostPlace place = place_for(saved->bytes, places, missing)) {
      saved->lease = std::move(place.lease);
      saved->parts = std::move(place.parts);
      offloaded.push_back(std::move(saved));
    } else {
      saved->to_offload = false;
      group.refused_bytes += saved->bytes;
    }
  }
}

void GroupMover::await(c10::Stream stream, const Event& done, const char* name) {
  StepTrace::Span span;
  span.begin(*trace_, SpanKind::wait, stream, name);
  runtime_->wait(stream, done);
  span.end();
  ++waits_;
}

void GroupMover::join(const Streams& streams) {
  for (Direction* direction : {&offloads_, &reloads_}) {
    const std::lock_guard lock(direction->mutex);
    runtime_->record(direction->fork, direction->stream);
    for (const c10::Stream stream : streams) {
      runtime_->wait(stream, direction->fork);
    }
  }
}

void GroupMover::settle(const Direction& direction) noexcept {
  try {
    // In a capture nothing runs, and the wait would fail it.
    if (runtime_->capture_status(direction.stream) == CaptureStatus::none) {
      runtime_->synchronize(direction.stream);
    }
  } catch (const std::exception&) {  // the device has failed: nothing runs any more
  }
}

void GroupMover::settle() noexcept {
  settle(offloads_);
  settle(reloads_);
}

CopyCounts GroupMover::counts() const noexcept { return {offloads_.bytes, reloads_.bytes, waits_, inline_reloads_}; }

CopyCounts GroupMover::take_counts() noexcept {
  return {offloads_.bytes.exchange(0), reloads_.bytes.exchange(0), waits_.exchange(0), inline_reloads_.exchange(0)};
}

}  // namespace sidestream
