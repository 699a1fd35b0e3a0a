#include "observe/external_synchronisation.h"

#include "observe/checked_runtime.h"

namespace sidestream {

bool ExternalSynchronisation::hosts_this_thread() const noexcept {
  return std::this_thread::get_id() == runtime_.host_ || OperatorObserverGuard::observes_this_thread();
}

void ExternalSynchronisation::recorded(const void* event, StreamKey stream) {
  const std::lock_guard lock(runtime_.mutex_);
  runtime_.note_record(event, stream);
}

void ExternalSynchronisation::waited(StreamKey stream, const void* event) {
  const std::lock_guard lock(runtime_.mutex_);
  runtime_.note_wait(stream, event);
}

void ExternalSynchronisation::host_saw_event(const void* event) {
  const std::lock_guard lock(runtime_.mutex_);
  if (runtime_.events_.contains(event) && hosts_this_thread()) {
    runtime_.note(JournalKind::host_waits_event, key_of(runtime_.inner().current_stream()), event, "synchronize");
  }
}

void ExternalSynchronisation::host_saw_stream(StreamKey stream) {
  const std::lock_guard lock(runtime_.mutex_);
  if (hosts_this_thread() && runtime_.capture_of(stream) == nullptr) {
    runtime_.note(JournalKind::host_waits_stream, stream, nullptr, "synchronize");
  }
}

void ExternalSynchronisation::host_saw_device(c10::Device device) {
  const std::lock_guard lock(runtime_.mutex_);
  if (device == runtime_.inner().device() && hosts_this_thread()) {
    runtime_.note(JournalKind::host_waits_device, key_of(runtime_.inner().current_stream()), nullptr, "synchronize");
  }
}

void ExternalSynchronisation::freed_behind(StreamKey stream, const void* begin, std::size_t bytes) {
  const std::lock_guard lock(runtime_.mutex_);
  runtime_.note_free({stream, begin, bytes});
}

}  // namespace sidestream
