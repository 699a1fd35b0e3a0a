// Operators in the journal, and freed memory that allocators hand out again after them.
#include <utility>

#include "observe/checked_runtime.h"
#include "observe/operator_touches.h"
#include "runtime/replayed_memory.h"

namespace sidestream {

void CheckedRuntime::note_free(const QueuedUses::Freed& freed) {
  if (stopped_ || capture_of(freed.stream) != nullptr) {
    return;  // what a capture frees is handed out again to captures only
  }
  write({JournalKind::freed_behind,
         freed.stream,
         nullptr,
         name_index("free"),
         site_index(),
         {{reinterpret_cast<std::uint64_t>(freed.begin), freed.bytes}}},
        stream_index(freed.stream), 0, site_index());
}

// Called before anything is written: so a free stands between what came before and what comes after it.
void CheckedRuntime::note_frees() {
  if (!uses_.empty()) {
    for (const QueuedUses::Freed& freed : uses_.take_freed()) {
      note_free(freed);
    }
  }
}

void CheckedRuntime::observe(const OperatorAccess& access, std::string_view phase, std::string_view name) {
  if (access.stream && !access.reads.empty()) {  // record_stream: touches nothing
    // An allocator does not own the memory of graphs: the sequence that launches the graph waits for such streams.
    const at::Tensor& used = access.reads.front();
    if (!used.has_storage() || ReplayedMemory::of(used.storage().data_ptr()) == nullptr) {
      const std::lock_guard lock(mutex_);
      uses_.add(used, key_of(*access.stream));
    }
    return;
  }
  OperatorTouches touches = touches_of(access, inner().device());
  if (touches.by_stream.empty() && touches.by_host.empty()) {
    return;
  }
  const StreamKey stream = key_of(inner().current_stream());
  const std::lock_guard lock(mutex_);
  if (stopped_) {
    return;
  }
  if (access.random && capture_of(stream) != nullptr) {
    touches.by_stream.push_back(seed_and_offset(false));
  }
  const std::uint32_t site = site_index(phase, name);
  if (!touches.by_host.empty()) {
    note_frees();
    write({JournalKind::host_access, 0, nullptr, name_index(access.name), site, std::move(touches.by_host)}, 0, 0,
          site);
  }
  if (!touches.by_stream.empty()) {
    note(touches.kind, stream, nullptr, access.name, std::move(touches.by_stream), site);
  }
  for (const at::Tensor& tensor : touches.pinned) {
    uses_.add(tensor, stream);
  }
  if (touches.host_waits && capture_of(stream) == nullptr) {
    note(JournalKind::host_waits_stream, stream, nullptr, access.name, {}, site);
  }
}

}  // namespace sidestream
