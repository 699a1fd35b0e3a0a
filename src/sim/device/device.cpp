#include "sim/device/device.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include <sidestream/error.h>

#include "base/site.h"
#include "sim/device/state.h"

namespace sidestream::sim {
namespace {

constexpr std::size_t largest_capacity = std::size_t{64} << 30;
constexpr std::size_t smallest_capacity = std::size_t{2} << 30;

}  // namespace

Device::Device() {
  // Addresses only; where their number is limited, a smaller device will do.
  for (std::size_t capacity = largest_capacity; state_ == nullptr; capacity /= 2) {
    try {
      state_ = std::make_unique<State>(capacity);
    } catch (const DeviceError&) {
      if (capacity <= smallest_capacity) {
        throw;
      }
    }
  }
}

Device& Device::get() {
  static Device* const device = new Device;  // never destroyed: LibTorch frees tensors until the very end
  return *device;
}

StreamState& Device::State::stream(c10::StreamId id) {
  if (id < 0 || static_cast<std::size_t>(id) >= streams.size()) {
    throw UsageError("sim device: stream " + std::to_string(id) + " is unknown; use a stream made by this device");
  }
  return streams[static_cast<std::size_t>(id)];
}

Capture* Device::State::capture_of_thread(std::thread::id thread) const noexcept {
  for (const auto& capture : captures) {
    if (capture->thread == thread) {
      return capture.get();
    }
  }
  return nullptr;
}

void Device::State::invalidate(Capture& capture, const std::string& reason) {
  if (!capture.invalidated) {
    capture.invalidated = true;
    capture.reason = reason;
  }
  throw CaptureError("sim device: the capture is invalidated: " + reason);
}

void Device::State::refuse_in_capture(const char* what) {
  if (open_captures.load(std::memory_order_relaxed) == 0) {
    return;
  }
  if (Capture* capture = capture_of_thread(std::this_thread::get_id())) {
    invalidate(*capture,
               std::string(what) + " while this thread captures; do it before begin_capture or after end_capture");
  }
}

void Device::State::check_issue(c10::StreamId id, StreamState& stream, const char* what) {
  if (stream.capture != nullptr) {
    if (stream.capture->invalidated) {
      throw CaptureError("sim device: " + std::string(what) +
                         " on a stream whose capture was invalidated: " + stream.capture->reason);
    }
    return;
  }
  if (id == 0 && open_captures.load(std::memory_order_relaxed) != 0) {
    if (Capture* capture = capture_of_thread(std::this_thread::get_id())) {
      invalidate(*capture, std::string(what) +
                               " on the default stream while this thread captures; make the capturing stream current");
    }
  }
}

void Device::State::order_after(StreamState& stream, c10::SmallVector<WorkId, 2>& after) {
  if (timeline.matters(stream.last)) {
    after.push_back(stream.last);
  }
  for (const WorkId id : stream.waits) {
    if (timeline.matters(id)) {
      after.push_back(id);
    }
  }
  stream.waits.clear();
  if (stream.host_seen != host_look) {
    stream.host_seen = host_look;
    if (timeline.matters(host_look)) {
      after.push_back(host_look);
    }
  }
}

void Device::State::host_saw(const StreamState& stream) {
  if (timeline.keeping()) {
    std::vector<WorkId> done(stream.waits.begin(), stream.waits.end());
    done.push_back(stream.last);
    host_saw(done);
  }
}

void Device::State::host_saw(const std::vector<WorkId>& done) {
  if (!timeline.keeping()) {
    return;
  }
  static const auto look = [] {
    Work work;
    work.kind = Work::Kind::event_wait;
    work.name = "seen by the host";
    return std::make_shared<const Work>(std::move(work));
  }();
  Queued queued;
  queued.work = look;
  queued.queue = host_queue;
  for (const WorkId id : done) {
    if (timeline.matters(id)) {
      queued.after.push_back(id);
    }
  }
  if (timeline.matters(host_look)) {
    queued.after.push_back(host_look);
  }
  host_look = timeline.next_id();
  timeline.force(timeline.append(std::move(queued)));
}

WorkId Device::State::enqueue(StreamState& stream, Queued queued) {
  queued.queue = queued.work->stream;
  order_after(stream, queued.after);
  stream.last = timeline.next_id();
  return timeline.append(std::move(queued));
}

bool Device::State::done(const StreamState& stream) const {
  return timeline.done(stream.last) &&
         std::all_of(stream.waits.begin(), stream.waits.end(), [&](WorkId waited) { return timeline.done(waited); });
}

void Device::State::force(StreamState& stream) {
  timeline.force(stream.last);
  for (const WorkId id : stream.waits) {
    timeline.force(id);
  }
}

const char* Device::place() {
  const Site* at = Site::innermost();
  if (at == nullptr) {
    return "";
  }
  std::string text(at->phase());
  text.append(" of ").append(at->name());
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  return state_->places.insert(std::move(text)).first->c_str();
}

void Device::ready(c10::StreamId id) {
  if (!state_->timeline.pending() && state_->open_captures.load(std::memory_order_acquire) == 0) {
    return;
  }
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  StreamState& stream = state_->stream(id);
  state_->check_issue(id, stream, "an operator");
  if (stream.capture == nullptr) {
    state_->force(stream);
    state_->timeline.stir();
  }
}

void Device::ready_again(c10::StreamId id) {
  if (!state_->timeline.pending()) {
    return;
  }
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  if (StreamState& stream = state_->stream(id); stream.capture == nullptr) {
    state_->force(stream);
  }
}

bool Device::keeps(c10::StreamId id) const noexcept {
  return state_->keeping.load(std::memory_order_acquire) || capturing(id);
}

bool Device::capturing(c10::StreamId id) const noexcept {
  if (state_->open_captures.load(std::memory_order_acquire) == 0) {
    return false;
  }
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  return id >= 0 && static_cast<std::size_t>(id) < state_->streams.size() &&
         state_->streams[static_cast<std::size_t>(id)].capture != nullptr;
}

void Device::issued(Work work) {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  StreamState& stream = state_->stream(work.stream);
  if (stream.capture != nullptr) {
    if (!stream.capture->invalidated) {
      work.place = place();
      stream.capture->add(stream.capture_last, std::make_shared<const Work>(std::move(work)));
    }
    return;
  }
  if (!state_->timeline.keeping()) {
    return;
  }
  if (work.kind != Work::Kind::compute && state_->copy_issued) {
    state_->copy_issued(work);
  }
  work.place = place();
  Queued queued;
  queued.work = std::make_shared<const Work>(std::move(work));
  queued.done = true;
  state_->enqueue(stream, std::move(queued));
}

void Device::host_reads(c10::StreamId id, const char* what, const char* why) {
  if (!state_->timeline.pending() && !keeps(id) && state_->open_captures.load(std::memory_order_acquire) == 0) {
    return;
  }
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  StreamState& stream = state_->stream(id);
  if (stream.capture != nullptr) {
    state_->invalidate(*stream.capture, std::string(what) + " " + why);
  }
  state_->check_issue(id, stream, what);
  state_->force(stream);
  state_->host_saw(stream);
}

void Device::set_schedule(const Schedule& schedule) {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  state_->timeline.set_order(schedule);
}

Schedule Device::schedule() const {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  return state_->timeline.order().schedule();
}

void Device::set_strict(bool strict) {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  state_->strict = strict;
}

std::uint64_t Device::unrecorded_waits() const {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  return state_->unrecorded_waits;
}

}  // namespace sidestream::sim
