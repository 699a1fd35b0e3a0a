#include "observe/checked_runtime.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

#include "base/site.h"

namespace sidestream {
namespace {

std::uint64_t pair_of(std::uint32_t high, std::uint64_t low) { return (static_cast<std::uint64_t>(high) << 48) ^ low; }

}  // namespace

CheckedRuntime::CheckedRuntime(std::shared_ptr<Runtime> runtime)
    : ForwardingRuntime(std::move(runtime)), listening_(inner().device().type(), external_) {
  const std::lock_guard lock(mutex_);
  names_.emplace("", 0);
}

CheckedRuntime::~CheckedRuntime() = default;

void CheckedRuntime::begin_step(std::uint64_t step) {
  const std::lock_guard lock(mutex_);
  step_ = step;
  host_ = std::this_thread::get_id();
  sites_.clear();
}

void CheckedRuntime::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
}

std::uint32_t CheckedRuntime::name_index(std::string_view name) {
  const auto [found, is_new] = names_.try_emplace(std::string(name), static_cast<std::uint32_t>(journal_.names.size()));
  if (is_new) {
    journal_.names.emplace_back(name);
  }
  return found->second;
}

std::uint32_t CheckedRuntime::site_index(std::string_view phase, std::string_view name) {
  if (const Site* site = Site::innermost(); site != nullptr) {
    phase = site->phase();
    name = site->name();
  }
  if (phase.empty() && name.empty() && step_ == 0) {
    return 0;
  }
  const JournalSite site{name_index(name), name_index(phase), step_};
  const auto [found, is_new] =
      sites_.try_emplace(pair_of(site.phase, site.name), static_cast<std::uint32_t>(journal_.sites.size()));
  if (is_new) {
    journal_.sites.push_back(site);
  }
  return found->second;
}

std::uint32_t CheckedRuntime::stream_index(StreamKey stream) {
  const auto [found, is_new] = streams_.try_emplace(stream, static_cast<std::uint32_t>(journal_.streams.size()));
  if (is_new) {
    journal_.streams.push_back(stream == inner().device().index() ? "the default stream"
                                                                  : "stream " + std::to_string(streams_.size()));
  }
  return found->second;
}

std::uint32_t CheckedRuntime::fork_index(const Captured& graph, StreamKey stream) {
  const auto place = std::find(graph.streams.begin(), graph.streams.end(), stream) - graph.streams.begin();
  const auto [found, is_new] = forks_.try_emplace(pair_of(graph.number, static_cast<std::uint64_t>(place)),
                                                  static_cast<std::uint32_t>(journal_.streams.size()));
  if (is_new) {
    journal_.streams.push_back("fork " + std::to_string(place) + " of graph " + std::to_string(graph.number));
  }
  return found->second;
}

std::uint32_t CheckedRuntime::new_event(const void* native) { return events_[native] = next_event_++; }

std::uint32_t CheckedRuntime::event_number(const void* native) {
  const auto [found, is_new] = events_.try_emplace(native, next_event_);
  next_event_ += is_new ? 1 : 0;
  return found->second;
}

CheckedRuntime::Captured* CheckedRuntime::capture_of(StreamKey stream) {
  for (const auto& capture : open_) {
    if (std::find(capture->streams.begin(), capture->streams.end(), stream) != capture->streams.end()) {
      return capture.get();
    }
  }
  return nullptr;
}

CheckedRuntime::Captured* CheckedRuntime::capture_that_recorded(const void* event) {
  for (const auto& capture : open_) {
    if (std::find(capture->recorded.begin(), capture->recorded.end(), event) != capture->recorded.end()) {
      return capture.get();
    }
  }
  return nullptr;
}

void CheckedRuntime::write(const Noted& noted, std::uint32_t stream, std::uint32_t event, std::uint32_t site) {
  JournalOperation operation;
  operation.kind = noted.kind;
  operation.stream = stream;
  operation.event = event;
  operation.name = noted.name;
  operation.site = site;
  operation.first_access = journal_.accesses.size();
  operation.accesses = static_cast<std::uint32_t>(noted.accesses.size());
  journal_.accesses.insert(journal_.accesses.end(), noted.accesses.begin(), noted.accesses.end());
  journal_.operations.push_back(operation);
}

void CheckedRuntime::note(JournalKind kind, StreamKey stream, const void* event, const char* name,
                          std::vector<JournalAccess> accesses, std::uint32_t site) {
  if (stopped_) {
    return;
  }
  note_frees();
  Noted noted{kind, stream, event, name_index(name), site, std::move(accesses)};
  if (Captured* capture = open_.empty() ? nullptr : capture_of(stream); capture != nullptr) {
    if (Site::innermost() == nullptr) {
      noted.site = capture->site;  // autograd's device thread captures a backward
    }
    noted.internal = std::find(capture->recorded.begin(), capture->recorded.end(), event) != capture->recorded.end();
    capture->operations.push_back(std::move(noted));
    return;
  }
  write(noted, stream_index(stream), event == nullptr ? 0 : event_number(event), noted.site);
}

void CheckedRuntime::synchronize(c10::Stream stream) {
  inner().synchronize(stream);
  const std::lock_guard lock(mutex_);
  note(JournalKind::host_waits_stream, key_of(stream), nullptr, "synchronize");
}

void CheckedRuntime::synchronize_device() {
  inner().synchronize_device();
  const std::lock_guard lock(mutex_);
  note(JournalKind::host_waits_device, key_of(inner().current_stream()), nullptr, "synchronize_device");
}

Event CheckedRuntime::create_event(EventTiming timing) {
  Event event = inner().create_event(timing);
  const std::lock_guard lock(mutex_);
  (void)new_event(event.native());
  return event;
}

ExternalEvent CheckedRuntime::create_external_event() {
  ExternalEvent event = inner().create_external_event();
  const std::lock_guard lock(mutex_);
  (void)new_event(event.native());
  return event;
}

void CheckedRuntime::forget_recorded(const void* event) {
  for (const auto& capture : open_) {
    capture->recorded.erase(std::remove(capture->recorded.begin(), capture->recorded.end(), event),
                            capture->recorded.end());
  }
}

void CheckedRuntime::note_record(const void* event, StreamKey stream) {
  forget_recorded(event);
  if (Captured* capture = capture_of(stream); capture != nullptr) {
    capture->recorded.push_back(event);
  }
  note(JournalKind::record, stream, event, "record");
}

void CheckedRuntime::note_wait(StreamKey stream, const void* event) {
  Captured* const capture = capture_that_recorded(event);
  if (capture == nullptr && !events_.contains(event)) {
    return;  // others recorded the event before this journal began (DrawOrder's): it is no missing record
  }
  if (capture != nullptr && capture_of(stream) == nullptr) {
    capture->streams.push_back(stream);  // forked
  }
  note(JournalKind::wait, stream, event, "wait");
}

void CheckedRuntime::record(const Event& event, c10::Stream stream) {
  inner().record(event, stream);
  const std::lock_guard lock(mutex_);
  note_record(event.native(), key_of(stream));
}

void CheckedRuntime::wait(c10::Stream stream, const Event& event) {
  inner().wait(stream, event);
  const std::lock_guard lock(mutex_);
  note_wait(key_of(stream), event.native());
}

void CheckedRuntime::synchronize(const Event& event) {
  inner().synchronize(event);
  const std::lock_guard lock(mutex_);
  note(JournalKind::host_waits_event, key_of(inner().current_stream()), event.native(), "synchronize");
}

void CheckedRuntime::record(const ExternalEvent& event, c10::Stream stream) {
  inner().record(event, stream);
  const std::lock_guard lock(mutex_);
  forget_recorded(event.native());  // one that this capture recorded had that address, and is gone
  note(JournalKind::record, key_of(stream), event.native(), "record");
}

void CheckedRuntime::wait(c10::Stream stream, const ExternalEvent& event) {
  inner().wait(stream, event);
  const std::lock_guard lock(mutex_);
  note(JournalKind::wait, key_of(stream), event.native(), "wait");
}

void CheckedRuntime::copy_to_host(void* pinned, const void* device, std::size_t bytes, c10::Stream stream) {
  inner().copy_to_host(pinned, device, bytes, stream);
  const std::lock_guard lock(mutex_);
  note(JournalKind::copy_to_host, key_of(stream), nullptr, "copy_to_host",
       {{reinterpret_cast<std::uint64_t>(device), bytes, false, false},
        {reinterpret_cast<std::uint64_t>(pinned), bytes, true, true}});
}

void CheckedRuntime::copy_to_device(void* device, const void* pinned, std::size_t bytes, c10::Stream stream) {
  inner().copy_to_device(device, pinned, bytes, stream);
  const std::lock_guard lock(mutex_);
  note(JournalKind::copy_to_device, key_of(stream), nullptr, "copy_to_device",
       {{reinterpret_cast<std::uint64_t>(pinned), bytes, false, true},
        {reinterpret_cast<std::uint64_t>(device), bytes, true, false}});
}

void CheckedRuntime::begin_capture(c10::Stream stream, const MemoryPool& pool,
                                   c10::ArrayRef<at::Generator> generators) {
  inner().begin_capture(stream, pool, generators);
  const std::lock_guard lock(mutex_);
  auto capture = std::make_unique<Captured>();
  capture->origin = key_of(stream);
  capture->number = ++graphs_made_;
  capture->streams.push_back(key_of(stream));
  capture->site = site_index();
  open_.push_back(std::move(capture));
}

std::unique_ptr<CheckedRuntime::Captured> CheckedRuntime::take_capture(StreamKey stream) {
  const auto found =
      std::find_if(open_.begin(), open_.end(), [&](const auto& capture) { return capture->origin == stream; });
  if (found == open_.end()) {
    return nullptr;
  }
  auto capture = std::move(*found);
  open_.erase(found);
  return capture;
}

Graph CheckedRuntime::end_capture(c10::Stream stream) {
  std::unique_ptr<Captured> capture;
  {
    const std::lock_guard lock(mutex_);
    capture = take_capture(key_of(stream));
  }
  Graph graph = inner().end_capture(stream);
  if (capture != nullptr) {
    const std::lock_guard lock(mutex_);
    graphs_[graph.native()] = std::move(capture);
  }
  return graph;
}

void CheckedRuntime::abandon_capture(c10::Stream stream) noexcept {
  {
    const std::lock_guard lock(mutex_);
    (void)take_capture(key_of(stream));
  }
  inner().abandon_capture(stream);
}

JournalAccess CheckedRuntime::seed_and_offset(bool write) {
  static constexpr std::array<std::byte, 16> stands_for{};
  return {reinterpret_cast<std::uint64_t>(stands_for.data()), stands_for.size(), write, false};
}

void CheckedRuntime::launch(const Graph& graph, c10::Stream stream) {
  inner().launch(graph, stream);
  const bool draws = inner().draws(graph);
  const std::lock_guard lock(mutex_);
  const auto found = graphs_.find(graph.native());
  if (found == graphs_.end() || stopped_) {
    return;
  }
  const Captured& captured = *found->second;
  const std::uint32_t origin = stream_index(key_of(stream));
  if (draws) {
    note(JournalKind::compute, key_of(stream), nullptr, "random seed and offset", {seed_and_offset(true)});
  }
  for (const Noted& noted : captured.operations) {
    const JournalSite captured_at = journal_.sites[noted.site];
    const auto [site, is_new] = sites_.try_emplace(pair_of(captured_at.phase, captured_at.name),
                                                   static_cast<std::uint32_t>(journal_.sites.size()));
    if (is_new) {
      journal_.sites.push_back({captured_at.name, captured_at.phase, step_});
    }
    std::uint32_t event = 0;
    if (noted.event != nullptr) {
      if (noted.internal) {
        const auto key = pair_of(captured.number, reinterpret_cast<std::uint64_t>(noted.event));
        const auto [number, is_new_event] = inner_events_.try_emplace(key, next_event_);
        next_event_ += is_new_event ? 1 : 0;
        event = number->second;
      } else {
        event = event_number(noted.event);
      }
    }
    const std::uint32_t queue = noted.stream == captured.origin ? origin : fork_index(captured, noted.stream);
    write(noted, queue, event, site->second);
  }
}

std::vector<std::string> CheckedRuntime::findings() {
  const std::lock_guard lock(mutex_);
  checker_.read(journal_);
  for (std::size_t i = texts_.size(); i < checker_.findings().size(); ++i) {
    texts_.push_back(describe(journal_, checker_.findings()[i]));
  }
  return texts_;
}

std::uint64_t CheckedRuntime::operations() const {
  const std::lock_guard lock(mutex_);
  return journal_.operations.size();
}

Journal CheckedRuntime::journal() const {
  const std::lock_guard lock(mutex_);
  return journal_;
}

}  // namespace sidestream
