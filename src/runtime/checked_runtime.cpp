#include "runtime/checked_runtime.h"

#include <algorithm>
#include <utility>

#include <c10/util/irange.h>

#include "runtime/issued_at.h"

namespace sidestream {
namespace {

/// The bytes that a strided tensor spans.
JournalAccess span_of(const at::Tensor& tensor, bool write) {
  std::int64_t last = 0;
  for (const auto d : c10::irange(tensor.dim())) {
    if (tensor.size(d) == 0) {
      return {};
    }
    last += (tensor.size(d) - 1) * tensor.stride(d);
  }
  const auto bytes = static_cast<std::uint64_t>(last + 1) * tensor.element_size();
  return {reinterpret_cast<std::uint64_t>(tensor.const_data_ptr()), bytes, write};
}

bool strided(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() &&
         tensor.storage().data() != nullptr;
}

std::uint64_t pair_of(std::uint32_t high, std::uint64_t low) { return (static_cast<std::uint64_t>(high) << 48) ^ low; }

}  // namespace

CheckedRuntime::CheckedRuntime(std::shared_ptr<Runtime> inner) : ForwardingRuntime(std::move(inner)) {
  names_.emplace("", 0);
}

CheckedRuntime::~CheckedRuntime() = default;

void CheckedRuntime::begin_step(std::uint64_t step) {
  const std::lock_guard lock(mutex_);
  step_ = step;
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

std::uint32_t CheckedRuntime::site_index() {
  const IssuedAt* place = IssuedAt::innermost();
  if (place == nullptr && step_ == 0) {
    return 0;
  }
  const std::uint32_t name = place == nullptr ? 0 : name_index(place->name());
  const std::uint32_t phase = place == nullptr ? 0 : name_index(place->phase());
  const auto [found, is_new] =
      sites_.try_emplace(pair_of(phase, name), static_cast<std::uint32_t>(journal_.sites.size()));
  if (is_new) {
    journal_.sites.push_back({name, phase, step_});
  }
  return found->second;
}

std::uint32_t CheckedRuntime::stream_index(c10::StreamId stream) {
  const auto [found, is_new] = streams_.try_emplace(stream, static_cast<std::uint32_t>(journal_.streams.size()));
  if (is_new) {
    journal_.streams.push_back(stream == 0 ? "the default stream" : "stream " + std::to_string(streams_.size()));
  }
  return found->second;
}

std::uint32_t CheckedRuntime::fork_index(const Captured& graph, c10::StreamId stream) {
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

CheckedRuntime::Captured* CheckedRuntime::capture_of(c10::StreamId stream) {
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

void CheckedRuntime::note(JournalKind kind, c10::Stream stream, const void* event, const char* name,
                          std::vector<JournalAccess> accesses) {
  if (stopped_) {
    return;
  }
  Noted noted{kind, stream.id(), event, name_index(name), site_index(), std::move(accesses)};
  if (Captured* capture = open_.empty() ? nullptr : capture_of(stream.id()); capture != nullptr) {
    if (IssuedAt::innermost() == nullptr) {
      noted.site = capture->site;  // autograd's device thread captures a backward
    }
    capture->operations.push_back(std::move(noted));
    return;
  }
  write(noted, stream_index(stream.id()), event == nullptr ? 0 : event_number(event), noted.site);
}

void CheckedRuntime::observe(const OperatorAccess& access) {
  std::vector<JournalAccess> accesses;
  bool on_host = false;
  const auto touches = [&](const at::Tensor& tensor, bool write) {
    if (strided(tensor) && tensor.device() == inner().device()) {
      accesses.push_back(span_of(tensor, write));
    }
  };
  const auto aliases_an_argument = [&](const at::Tensor& output) {
    return std::any_of(access.reads.begin(), access.reads.end(), [&](const at::Tensor& argument) {
      return argument.has_storage() && output.has_storage() && argument.storage().is_alias_of(output.storage());
    });
  };
  bool made = false;
  for (const at::Tensor& output : access.outputs) {
    on_host = on_host || (output.defined() && output.device().is_cpu());
    if (output.defined() && !aliases_an_argument(output)) {
      touches(output, true);
      made = true;
    }
  }
  if (!made && access.writes.empty()) {
    // A view, or autograd's own name for one; what gives no tensor gives a value to the host.
    if (!access.outputs.empty() || std::string_view(access.name).rfind("aten::", 0) != 0) {
      return;
    }
    on_host = true;
  }
  for (const at::Tensor& tensor : access.reads) {
    touches(tensor, false);
  }
  for (const at::Tensor& tensor : access.writes) {
    on_host = on_host || (tensor.defined() && tensor.device().is_cpu());
    touches(tensor, true);
  }
  if (accesses.empty()) {
    return;
  }
  const std::lock_guard lock(mutex_);
  const c10::Stream stream = inner().current_stream();
  note(JournalKind::compute, stream, nullptr, access.name, std::move(accesses));
  if (on_host && capture_of(stream.id()) == nullptr) {
    note(JournalKind::host_waits_stream, stream, nullptr, access.name);  // the value is on the host when it returns
  }
}

void CheckedRuntime::synchronize(c10::Stream stream) {
  inner().synchronize(stream);
  const std::lock_guard lock(mutex_);
  note(JournalKind::host_waits_stream, stream, nullptr, "synchronize");
}

void CheckedRuntime::synchronize_device() {
  inner().synchronize_device();
  const std::lock_guard lock(mutex_);
  note(JournalKind::host_waits_device, inner().current_stream(), nullptr, "synchronize_device");
}

bool CheckedRuntime::idle(c10::Stream stream) {
  const bool idle = inner().idle(stream);
  if (idle) {
    const std::lock_guard lock(mutex_);
    note(JournalKind::host_waits_stream, stream, nullptr, "idle");
  }
  return idle;
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

void CheckedRuntime::record(const Event& event, c10::Stream stream) {
  inner().record(event, stream);
  const std::lock_guard lock(mutex_);
  for (const auto& capture : open_) {
    capture->recorded.erase(std::remove(capture->recorded.begin(), capture->recorded.end(), event.native()),
                            capture->recorded.end());
  }
  if (Captured* capture = capture_of(stream.id()); capture != nullptr) {
    capture->recorded.push_back(event.native());
  }
  note(JournalKind::record, stream, event.native(), "record");
}

void CheckedRuntime::wait(c10::Stream stream, const Event& event) {
  inner().wait(stream, event);
  const std::lock_guard lock(mutex_);
  if (Captured* capture = capture_that_recorded(event.native());
      capture != nullptr && capture_of(stream.id()) == nullptr) {
    capture->streams.push_back(stream.id());  // forked
  }
  note(JournalKind::wait, stream, event.native(), "wait");
}

bool CheckedRuntime::query(const Event& event) {
  const bool done = inner().query(event);
  if (done) {
    const std::lock_guard lock(mutex_);
    note(JournalKind::host_waits_event, inner().current_stream(), event.native(), "query");
  }
  return done;
}

void CheckedRuntime::synchronize(const Event& event) {
  inner().synchronize(event);
  const std::lock_guard lock(mutex_);
  note(JournalKind::host_waits_event, inner().current_stream(), event.native(), "synchronize");
}

void CheckedRuntime::record(const ExternalEvent& event, c10::Stream stream) {
  inner().record(event, stream);
  const std::lock_guard lock(mutex_);
  note(JournalKind::record, stream, event.native(), "record");
}

void CheckedRuntime::wait(c10::Stream stream, const ExternalEvent& event) {
  inner().wait(stream, event);
  const std::lock_guard lock(mutex_);
  note(JournalKind::wait, stream, event.native(), "wait");
}

void CheckedRuntime::copy_to_host(void* pinned, const void* device, std::size_t bytes, c10::Stream stream) {
  inner().copy_to_host(pinned, device, bytes, stream);
  const std::lock_guard lock(mutex_);
  note(JournalKind::copy_to_host, stream, nullptr, "copy_to_host",
       {{reinterpret_cast<std::uint64_t>(device), bytes, false},
        {reinterpret_cast<std::uint64_t>(pinned), bytes, true}});
}

void CheckedRuntime::copy_to_device(void* device, const void* pinned, std::size_t bytes, c10::Stream stream) {
  inner().copy_to_device(device, pinned, bytes, stream);
  const std::lock_guard lock(mutex_);
  note(JournalKind::copy_to_device, stream, nullptr, "copy_to_device",
       {{reinterpret_cast<std::uint64_t>(pinned), bytes, false},
        {reinterpret_cast<std::uint64_t>(device), bytes, true}});
}

void CheckedRuntime::begin_capture(c10::Stream stream, const MemoryPool& pool) {
  inner().begin_capture(stream, pool);
  const std::lock_guard lock(mutex_);
  auto capture = std::make_unique<Captured>();
  capture->origin = stream.id();
  capture->number = ++graphs_made_;
  capture->streams.push_back(stream.id());
  capture->site = site_index();
  open_.push_back(std::move(capture));
}

std::unique_ptr<CheckedRuntime::Captured> CheckedRuntime::take_capture(c10::StreamId stream) {
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
    capture = take_capture(stream.id());
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
    (void)take_capture(stream.id());
  }
  inner().abandon_capture(stream);
}

void CheckedRuntime::launch(const Graph& graph, c10::Stream stream) {
  inner().launch(graph, stream);
  const std::lock_guard lock(mutex_);
  const auto found = graphs_.find(graph.native());
  if (found == graphs_.end() || stopped_) {
    return;
  }
  const Captured& captured = *found->second;
  const std::uint32_t origin = stream_index(stream.id());
  for (const Noted& noted : captured.operations) {
    const JournalSite captured_at = journal_.sites[noted.site];
    const auto [site, is_new] = sites_.try_emplace(pair_of(captured_at.phase, captured_at.name),
                                                   static_cast<std::uint32_t>(journal_.sites.size()));
    if (is_new) {
      journal_.sites.push_back({captured_at.name, captured_at.phase, step_});
    }
    std::uint32_t event = 0;
    if (noted.event != nullptr) {
      const bool internal =
          std::find(captured.recorded.begin(), captured.recorded.end(), noted.event) != captured.recorded.end();
      if (internal) {
        const auto key = pair_of(captured.number, reinterpret_cast<std::uint64_t>(noted.event));
        const auto [number, is_new_event] = inner_events_.try_emplace(key, next_event_);
        next_event_ += is_new_event ? 1 : 0;
        event = number->second;
      } else {
        event = event_number(noted.event);
      }
    }
    const std::uint32_t lane = noted.stream == captured.origin ? origin : fork_index(captured, noted.stream);
    write(noted, lane, event, site->second);
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
