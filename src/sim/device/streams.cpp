#include <cstring>

#include <sidestream/error.h>

#include "sim/device/state.h"

namespace sidestream::sim {
namespace {

thread_local c10::StreamId current = 0;

std::shared_ptr<const Work> event_work(Work::Kind kind, c10::StreamId stream) {
  auto work = std::make_shared<Work>();
  work->kind = kind;
  work->stream = stream;
  work->name = kind == Work::Kind::event_record ? "record" : "wait";
  return work;
}

c10::intrusive_ptr<EventState> reference(EventState& event) {
  return c10::intrusive_ptr<EventState>::unsafe_reclaim_from_nonowning(&event);
}

}  // namespace

c10::StreamId current_stream() noexcept { return current; }
void set_current_stream(c10::StreamId stream) noexcept { current = stream; }

c10::StreamId Device::create_stream() {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  state_->streams.emplace_back();
  return static_cast<c10::StreamId>(state_->streams.size() - 1);
}

void Device::destroy_stream(c10::StreamId id) noexcept {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  abandon_capture(id);
}

void Device::synchronize(c10::StreamId id) {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  StreamState& stream = state_->stream(id);
  if (stream.capture != nullptr) {
    state_->invalidate(*stream.capture,
                       "synchronize on a capturing stream; do it before begin_capture or after end_capture");
  }
  state_->refuse_in_capture("synchronize on a stream");
  state_->force(stream);
  state_->host_saw(stream);
}

void Device::synchronize() {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  for (const auto& capture : state_->captures) {
    state_->invalidate(*capture, "synchronize of the device; do it before begin_capture or after end_capture");
  }
  state_->timeline.drain();
  if (state_->timeline.keeping()) {
    std::vector<WorkId> all;
    for (const StreamState& stream : state_->streams) {
      all.push_back(stream.last);
    }
    state_->host_saw(all);
  }
}

bool Device::idle(c10::StreamId id) {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  StreamState& stream = state_->stream(id);
  if (stream.capture != nullptr) {
    state_->invalidate(*stream.capture,
                       "a query of a capturing stream; do it before begin_capture or after end_capture");
  }
  state_->refuse_in_capture("a query of a stream");
  const bool done = state_->done(stream);
  // A loop that polls must end: what was found unfinished is finished by the next look.
  state_->force(stream);
  if (done) {
    state_->host_saw(stream);
  }
  return done;
}

void Device::record(EventState& event, c10::StreamId id) {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  StreamState& stream = state_->stream(id);
  state_->check_issue(id, stream, "record of an event");
  if (Capture* capture = stream.capture) {
    if (event.external) {
      capture->add(stream.capture_last, event_work(Work::Kind::event_record, id), reference(event));
    } else {
      event.capture = capture->number;
      event.capture_marks.assign(stream.capture_last.begin(), stream.capture_last.end());
    }
    return;
  }
  ++event.version;
  event.capture = 0;
  event.mark = no_work;
  Timeline& timeline = state_->timeline;
  if (!timeline.pending() && !timeline.keeping()) {
    event.done_at = std::chrono::steady_clock::now();
    return;
  }
  Queued queued;
  queued.work = event_work(Work::Kind::event_record, id);
  queued.event = reference(event);
  event.mark = timeline.next_id();
  state_->enqueue(stream, std::move(queued));
}

void Device::wait(c10::StreamId id, EventState& event) {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  StreamState& stream = state_->stream(id);
  state_->check_issue(id, stream, "wait for an event");
  Capture* recorder = nullptr;  // the open capture that recorded the event
  if (event.capture != 0) {
    for (const auto& open : state_->captures) {
      if (open->number == event.capture) {
        recorder = open.get();
      }
    }
    if (recorder == nullptr) {
      const std::string reason =
          "a wait for an event that was recorded inside a capture which has ended; use an external event, or record it "
          "again";
      if (stream.capture != nullptr) {
        state_->invalidate(*stream.capture, reason);
      }
      throw CaptureError("sim device: " + reason);
    }
  }
  if (recorder != nullptr && stream.capture == nullptr) {
    if (id == 0) {
      state_->invalidate(*recorder,
                         "the default stream waits for an event of the capture; fork to a stream of create_stream()");
    }
    stream.capture = recorder;
    stream.capture_last.clear();
    recorder->streams.push_back(id);
  }
  if (Capture* capture = stream.capture) {
    if (event.external) {
      capture->add(stream.capture_last, event_work(Work::Kind::event_wait, id), reference(event));
    } else if (recorder != capture) {
      if (recorder != nullptr && !recorder->invalidated) {
        recorder->invalidated = true;
        recorder->reason = "another capture waits for an event that this capture recorded; captures cannot be merged";
      }
      state_->invalidate(
          *capture, "a wait for an event recorded outside of the capture; record it inside, or use an external event");
    } else {
      merge(stream.capture_last, event.capture_marks);
    }
    return;
  }
  if (event.version == 0) {
    ++state_->unrecorded_waits;
    if (state_->strict) {
      throw UsageError("sim device: a wait for an event that was never recorded waits for nothing; record it first");
    }
    return;
  }
  if (state_->timeline.matters(event.mark)) {
    stream.waits.push_back(event.mark);
  }
}

bool Device::query(EventState& event) {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  state_->refuse_in_capture("a query of an event");
  if (event.capture != 0) {
    throw CaptureError("sim device: a query of an event that was recorded inside a capture; record it outside first");
  }
  const bool done = state_->timeline.done(event.mark);
  state_->timeline.force(event.mark);  // as in idle()
  if (done) {
    state_->host_saw(std::vector<WorkId>{event.mark});
  }
  return done;
}

void Device::synchronize(EventState& event) {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  state_->refuse_in_capture("synchronize on an event");
  if (event.capture != 0) {
    throw CaptureError(
        "sim device: synchronize on an event that was recorded inside a capture; record it outside first");
  }
  state_->timeline.force(event.mark);
  state_->host_saw(std::vector<WorkId>{event.mark});
}

void Device::copy(Work::Kind kind, void* destination, const void* source, std::size_t bytes, c10::StreamId id) {
  if (bytes == 0) {
    return;
  }
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  StreamState& stream = state_->stream(id);
  const bool to_host = kind == Work::Kind::copy_to_host;
  const auto* on_device = static_cast<const std::byte*>(to_host ? source : destination);
  const void* on_host = to_host ? destination : source;
  if (!owns(on_device) || !owns(on_device + bytes - 1)) {
    throw UsageError("sim device: a copy of " + std::to_string(bytes) + " bytes whose device side is not sim memory");
  }
  if (!state_->pinned.holds(on_host, bytes)) {
    throw UsageError("sim device: a copy of " + std::to_string(bytes) +
                     " bytes whose host side is not pinned; use memory of allocate_pinned");
  }
  state_->check_issue(id, stream, to_host ? "copy_to_host" : "copy_to_device");
  Timeline& timeline = state_->timeline;
  if (stream.capture == nullptr && timeline.order().immediate() && !timeline.pending() && !timeline.keeping()) {
    std::memcpy(destination, source, bytes);
    return;
  }
  auto work = std::make_shared<Work>();
  work->kind = kind;
  work->stream = id;
  work->name = to_host ? "copy_to_host" : "copy_to_device";
  work->place = place();
  work->run = [destination, source, bytes] { std::memcpy(destination, source, bytes); };
  work->accesses = {{static_cast<const std::byte*>(source), bytes, false},
                    {static_cast<const std::byte*>(destination), bytes, true, true}};
  if (Capture* capture = stream.capture) {
    capture->memory.preserve(static_cast<std::byte*>(destination), bytes);
    work->run();
    capture->add(stream.capture_last, std::move(work));
    return;
  }
  if (state_->copy_issued) {
    state_->copy_issued(*work);
  }
  Queued queued;
  queued.work = std::move(work);
  state_->enqueue(stream, std::move(queued));
  timeline.stir();
}

}  // namespace sidestream::sim
