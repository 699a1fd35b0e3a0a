#include "sim/device/sim_runtime.h"

#include <chrono>
#include <string>

#include <sidestream/error.h>

#include "runtime/capture_turn.h"
#include "sim/device/graph.h"
#include "sim/torch/device_guard.h"
#include "sim/torch/generator.h"

namespace sidestream::sim {
namespace {

using SharedGraph = std::shared_ptr<GraphBody>;

[[noreturn]] void refuse(const char* what, const char* why) {
  throw UsageError(std::string("sim device: ") + what + " " + why);
}

c10::StreamId id_of(c10::Stream stream) {
  if (stream.device_type() != kDeviceType) {
    refuse("the stream", "belongs to another backend; use a stream of this runtime");
  }
  return stream.id();
}

template <typename Native, HandleKind kind>
Native& native_of(const Handle<kind>& handle, const char* what) {
  if (!handle) {
    refuse(what, "is empty (destroyed, moved from or reset); make a new one");
  }
  if (handle.runtime()->device().type() != kDeviceType) {
    refuse(what, "belongs to another backend; make it with this runtime");
  }
  return *static_cast<Native*>(handle.native());
}

EventState& state_of(const Event& event) { return native_of<EventState>(event, "the event"); }
EventState& state_of(const ExternalEvent& event) { return native_of<EventState>(event, "the external event"); }

}  // namespace

c10::Device SimRuntime::device() const noexcept { return sim_device(); }

DeviceInfo SimRuntime::info() const {
  return {"simulated accelerator", "none: runs LibTorch's CPU kernels in host memory", device_.memory_bytes()};
}

c10::Stream SimRuntime::current_stream() const { return as_stream(sim::current_stream()); }
void SimRuntime::set_current_stream(c10::Stream stream) { sim::set_current_stream(id_of(stream)); }

OwnedStream SimRuntime::create_stream() {
  const c10::StreamId id = device_.create_stream();
  return {Handle<HandleKind::stream>(*this, reinterpret_cast<void*>(id)), as_stream(id)};
}

void SimRuntime::synchronize(c10::Stream stream) { device_.synchronize(id_of(stream)); }
void SimRuntime::synchronize_device() {
  CaptureTurn::let_others_finish(device(), "the device is synchronized");
  device_.let_draws_finish();
  device_.synchronize();
}

Event SimRuntime::create_event(EventTiming /*timing*/) {
  return {*this, c10::make_intrusive<EventState>(false).release()};
}
void SimRuntime::record(const Event& event, c10::Stream stream) { device_.record(state_of(event), id_of(stream)); }
void SimRuntime::wait(c10::Stream stream, const Event& event) { device_.wait(id_of(stream), state_of(event)); }
void SimRuntime::synchronize(const Event& event) { device_.synchronize(state_of(event)); }

double SimRuntime::elapsed_ms(const Event& begin, const Event& end) {
  const EventState& from = state_of(begin);
  const EventState& to = state_of(end);
  if (from.version == 0 || to.version == 0 || !device_.query(state_of(begin)) || !device_.query(state_of(end))) {
    refuse("elapsed_ms", "needs two events that were recorded and are done; synchronize on the later one first");
  }
  return std::chrono::duration<double, std::milli>(to.done_at - from.done_at).count();
}

ExternalEvent SimRuntime::create_external_event() { return {*this, c10::make_intrusive<EventState>(true).release()}; }
void SimRuntime::record(const ExternalEvent& event, c10::Stream stream) {
  device_.record(state_of(event), id_of(stream));
}
void SimRuntime::wait(c10::Stream stream, const ExternalEvent& event) { device_.wait(id_of(stream), state_of(event)); }

void SimRuntime::copy_to_host(void* pinned, const void* device, std::size_t bytes, c10::Stream stream) {
  device_.copy(Work::Kind::copy_to_host, pinned, device, bytes, id_of(stream));
}
void SimRuntime::copy_to_device(void* device, const void* pinned, std::size_t bytes, c10::Stream stream) {
  device_.copy(Work::Kind::copy_to_device, device, pinned, bytes, id_of(stream));
}

MemoryStats SimRuntime::memory_stats() const { return device_.memory_stats(); }
void SimRuntime::reset_peak_memory_stats() { device_.reset_peak_memory_stats(); }
DeviceRoom SimRuntime::room() const { return device_.room(); }
MemoryRefusal SimRuntime::latest_refusal() const { return device_.latest_refusal(); }
void SimRuntime::release_cached_memory() {
  CaptureTurn::let_others_finish(device(), "cached memory is released");
  device_.release_cached_memory();
}
MemoryPool SimRuntime::create_pool() { return {*this, device_.create_pool()}; }
std::int64_t SimRuntime::allocated_in(const MemoryPool& pool) const {
  return device_.allocated_in(native_of<Pool>(pool, "the memory pool"));
}

PinnedMemory SimRuntime::allocate_pinned(std::size_t bytes) {
  void* data = device_.allocate_pinned(bytes);
  return {Handle<HandleKind::pinned>(*this, data), static_cast<std::byte*>(data), bytes};
}

void SimRuntime::begin_capture(c10::Stream stream, const MemoryPool& pool, c10::ArrayRef<at::Generator> generators) {
  for (const at::Generator& generator : generators) {
    if (!is_sim_generator(generator)) {
      refuse("the generator", "belongs to another backend; make it for the sim device");
    }
  }
  device_.begin_capture(id_of(stream), &native_of<Pool>(pool, "the memory pool"), generators);
}
Graph SimRuntime::end_capture(c10::Stream stream) {
  return {*this, new SharedGraph(device_.end_capture(id_of(stream)))};
}
void SimRuntime::abandon_capture(c10::Stream stream) noexcept {
  if (stream.device_type() == kDeviceType) {
    device_.abandon_capture(stream.id());
  }
}
CaptureStatus SimRuntime::capture_status(c10::Stream stream) const { return device_.capture_status(id_of(stream)); }
void SimRuntime::launch(const Graph& graph, c10::Stream stream) {
  device_.launch(native_of<SharedGraph>(graph, "the graph"), id_of(stream));
}
bool SimRuntime::draws(const Graph& graph) const { return native_of<SharedGraph>(graph, "the graph")->draws; }
std::vector<GraphNode> SimRuntime::nodes(const Graph& graph) const {
  return native_of<SharedGraph>(graph, "the graph")->list();
}
std::size_t SimRuntime::captured_nodes(c10::Stream stream) const { return device_.captured_nodes(id_of(stream)); }

void SimRuntime::destroy(HandleKind kind, void* native) noexcept {
  switch (kind) {
    case HandleKind::stream:
      device_.destroy_stream(reinterpret_cast<c10::StreamId>(native));
      break;
    case HandleKind::event:
    case HandleKind::external_event:
      c10::intrusive_ptr<EventState>::reclaim(static_cast<EventState*>(native)).reset();
      break;
    case HandleKind::graph:
      delete static_cast<SharedGraph*>(native);
      break;
    case HandleKind::pool:
      device_.release_pool(static_cast<Pool*>(native));
      break;
    case HandleKind::pinned:
      device_.free_pinned(native);
      break;
  }
}

}  // namespace sidestream::sim
