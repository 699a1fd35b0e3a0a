#include "unit/graphs/planted_faults.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "base/site.h"

namespace sidestream::testing_model {

namespace {

std::string_view phase_now() {
  const Site* site = Site::innermost();
  return site == nullptr ? std::string_view() : site->phase();
}

/// The call whose work is issued.
std::string_view call_now() {
  const Site* site = Site::innermost();
  return site == nullptr ? std::string_view() : site->name();
}

}  // namespace

bool Fault::in_capture() const { return act == Act::ready_at_capture_begin || act == Act::done_at_capture_begin; }

/// The device's guard for LibTorch, which in place of the registered one tells the allocator nothing of further users of memory.
class PlantedRuntime::SilentGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  SilentGuard(PlantedRuntime& runtime, c10::DeviceType type)
      : runtime_(runtime), inner_(c10::impl::getDeviceGuardImpl(type)) {
    c10::impl::device_guard_impl_registry[static_cast<std::size_t>(type)].store(this);
  }
  SilentGuard(const SilentGuard&) = delete;
  SilentGuard& operator=(const SilentGuard&) = delete;
  ~SilentGuard() override {
    c10::impl::device_guard_impl_registry[static_cast<std::size_t>(inner_->type())].store(inner_);
  }

  c10::DeviceType type() const override { return inner_->type(); }
  c10::Device exchangeDevice(c10::Device device) const override { return inner_->exchangeDevice(device); }
  c10::Device getDevice() const override { return inner_->getDevice(); }
  void setDevice(c10::Device device) const override { inner_->setDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { inner_->uncheckedSetDevice(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return inner_->deviceCount(); }
  c10::Stream getStream(c10::Device device) const override { return inner_->getStream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return inner_->getDefaultStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return inner_->getStreamFromGlobalPool(device, high_priority);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return inner_->getNewStream(device, priority);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return inner_->exchangeStream(stream); }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return inner_->getStreamNativeHandle(stream); }
  c10::DeviceCapability getDeviceCapability(c10::Device device) const override {
    return inner_->getDeviceCapability(device);
  }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex index) const override {
    return inner_->elapsedTime(begin, end, index);
  }
  bool queryStream(const c10::Stream& stream) const override { return inner_->queryStream(stream); }
  void synchronizeStream(const c10::Stream& stream) const override { inner_->synchronizeStream(stream); }
  void synchronizeDevice(c10::DeviceIndex index) const override { inner_->synchronizeDevice(index); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (!runtime_.meant(Fault::Act::drop_hold, stream, Mark::any, 0)) {
      inner_->recordDataPtrOnStream(data, stream);
    }
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex index, c10::EventFlag flag) const override {
    inner_->record(event, stream, index, flag);
  }
  void block(void* event, const c10::Stream& stream) const override { inner_->block(event, stream); }
  bool queryEvent(void* event) const override { return inner_->queryEvent(event); }
  void synchronizeEvent(void* event) const override { inner_->synchronizeEvent(event); }
  void destroyEvent(void* event, c10::DeviceIndex index) const noexcept override { inner_->destroyEvent(event, index); }

 private:
  PlantedRuntime& runtime_;
  const c10::impl::DeviceGuardImplInterface* inner_;
};

PlantedRuntime::PlantedRuntime(std::shared_ptr<Runtime> inner, Fault fault)
    : ForwardingRuntime(std::move(inner)),
      fault_(fault),
      spare_(this->inner().create_stream()),
      spare_event_(this->inner().create_event(EventTiming::off)),
      begin_(this->inner().create_event(EventTiming::off)) {
  if (fault_.act == Fault::Act::drop_hold) {
    guard_ = std::make_unique<SilentGuard>(*this, device().type());
  }
}

PlantedRuntime::~PlantedRuntime() = default;

bool PlantedRuntime::meant(Fault::Act act, c10::Stream stream, Mark mark, int nth, std::string_view begun,
                           bool of_another) {
  if (act != fault_.act || (!armed_ && !fault_.at_capture()) || (fault_.captured && !capturing_)) {
    return false;
  }
  const std::string_view phase = phase_now();
  const StreamRole role = stream == inner().current_stream() ? StreamRole::current
                          : streams_[stream.id()].copies     ? StreamRole::copies
                                                             : StreamRole::other;
  const bool found = (fault_.phase == "*" || fault_.phase == phase) &&
                     (fault_.role == StreamRole::any || fault_.role == role) &&
                     (fault_.mark == Mark::any || fault_.mark == mark) && nth >= fault_.nth &&
                     (fault_.begun == "*" || fault_.begun == begun) && (!fault_.of_another || of_another);
  changed_ += found ? 1 : 0;
  return found;
}

void PlantedRuntime::synchronize_device() {
  ++synchronized_;
  if (synchronized_ != fault_.nth ||
      !meant(Fault::Act::skip_synchronize, inner().current_stream(), Mark::any, fault_.nth)) {
    inner().synchronize_device();
  }
}

void PlantedRuntime::record(const Event& event, c10::Stream stream) {
  Given& given = streams_[stream.id()];
  const Mark mark = given.last;
  if (given.last == Mark::to_host) {
    given.last = Mark::all_to_host;
  } else if (given.last == Mark::to_device) {
    given.last = Mark::all_to_device;
  }
  if (meant(Fault::Act::drop_record, stream, mark, 0, given.begun)) {
    return;
  }
  events_[event.native()] = {mark, 0, given.begun, call_now()};
  inner().record(event, stream);
  issue_held(given, stream);
}

void PlantedRuntime::wait(c10::Stream stream, const Event& event) {
  Recorded& recorded = events_[event.native()];
  Given& given = streams_[stream.id()];
  const int nth = recorded.mark == Mark::work ? ++given.waits : ++recorded.waiters;
  if (!capturing_) {
    given.begun = phase_now();
  }
  if (meant(Fault::Act::drop_wait, stream, recorded.mark, nth, recorded.begun, recorded.of != call_now())) {
    if (capturing_ && (recorded.mark == Mark::all_to_host || recorded.mark == Mark::all_to_device)) {
      late_joins_.emplace_back(stream, &event);  // or the capture would not end
      joined_late_ = true;
    }
    return;
  }
  inner().wait(stream, event);
  follow_elsewhere(stream, event);
}

/// With `launch_elsewhere` the further stream waits for what the side stream waits for, except for the side stream's own forwards,
/// and backwards wait for the further stream.
template <class AnyEvent>
void PlantedRuntime::follow_elsewhere(c10::Stream stream, const AnyEvent& event) {
  const Site* site = Site::innermost();
  if (fault_.act != Fault::Act::launch_elsewhere || !armed_ || site == nullptr || stream == inner().current_stream()) {
    return;
  }
  if (site->phase() == "forward") {
    inner().wait(spare_, event);
  } else {
    inner().record(spare_event_, spare_);
    inner().wait(stream, spare_event_);
  }
}

/// In a capture: records `event` before all that was captured, where that is the fault.
bool PlantedRuntime::record_at_begin(Fault::Act act, const ExternalEvent& event, c10::Stream stream, int nth) {
  if (!meant(act, stream, Mark::any, nth)) {
    return false;
  }
  inner().record(event, spare_);
  inner().record(spare_event_, spare_);
  late_joins_.emplace_back(*capture_, &spare_event_);
  return true;
}

void PlantedRuntime::record(const ExternalEvent& event, c10::Stream stream) {
  const std::string_view phase = phase_now();
  if (capturing_ && phase == "offload") {
    events_[event.native()] = {Mark::ready};
    if (record_at_begin(Fault::Act::ready_at_capture_begin, event, stream, stream == capture_ ? 1 : 2)) {
      return;
    }
  } else if (capturing_ && !std::exchange(done_recorded_, true)) {
    events_[event.native()] = {phase == "forward"    ? Mark::forward_done
                               : phase == "backward" ? Mark::backward_done
                                                     : Mark::weights_done};
    if (record_at_begin(Fault::Act::done_at_capture_begin, event, stream, 0)) {
      return;
    }
  }
  if (!capturing_ && meant(Fault::Act::drop_record, stream, Mark::ready, 0)) {
    return;
  }
  inner().record(event, stream);
}

void PlantedRuntime::wait(c10::Stream stream, const ExternalEvent& event) {
  if (meant(Fault::Act::drop_wait, stream, events_[event.native()].mark, 0)) {
    return;
  }
  inner().wait(stream, event);
  follow_elsewhere(stream, event);
}

void PlantedRuntime::issue(const Copy& copy, c10::Stream stream) {
  if (copy.to_host) {
    inner().copy_to_host(copy.to, copy.from, copy.bytes, stream);
  } else {
    inner().copy_to_device(copy.to, copy.from, copy.bytes, stream);
  }
}

void PlantedRuntime::issue_held(Given& given, c10::Stream stream) {
  for (const Copy& held : given.held_copies) {
    issue(held, stream);
  }
  given.held_copies.clear();
  if (given.held_launch != nullptr) {
    inner().launch(*given.held_launch, stream);
    given.held_launch = nullptr;
  }
}

void PlantedRuntime::copy(const Copy& copy, c10::Stream stream) {
  Given& given = streams_[stream.id()];
  given.last = copy.to_host ? Mark::to_host : Mark::to_device;
  given.waits = 0;
  given.copies = given.copies || !capturing_;
  if (!capturing_ && meant(Fault::Act::record_first, stream, given.last, 0, given.begun)) {
    given.held_copies.push_back(copy);
  } else {
    issue(copy, stream);
  }
}

void PlantedRuntime::copy_to_host(void* pinned, const void* device, std::size_t bytes, c10::Stream stream) {
  copy({true, pinned, device, bytes}, stream);
}

void PlantedRuntime::copy_to_device(void* device, const void* pinned, std::size_t bytes, c10::Stream stream) {
  copy({false, device, pinned, bytes}, stream);
}

void PlantedRuntime::begin_capture(c10::Stream stream, const MemoryPool& pool,
                                   c10::ArrayRef<at::Generator> generators) {
  inner().begin_capture(stream, pool, generators);
  capturing_ = true;
  capture_ = stream;
  done_recorded_ = false;
  if (fault_.in_capture()) {
    inner().record(begin_, stream);
    inner().wait(spare_, begin_);
  }
}

Graph PlantedRuntime::end_capture(c10::Stream stream) {
  for (const auto& [waiter, event] : late_joins_) {
    inner().wait(waiter, *event);
  }
  late_joins_.clear();
  capturing_ = false;
  return inner().end_capture(stream);
}

void PlantedRuntime::abandon_capture(c10::Stream stream) noexcept {
  late_joins_.clear();
  capturing_ = false;
  inner().abandon_capture(stream);
}

void PlantedRuntime::launch(const Graph& graph, c10::Stream stream) {
  Given& given = streams_[stream.id()];
  given.last = Mark::launch;
  given.waits = 0;
  if (meant(Fault::Act::record_first, stream, Mark::launch, 0)) {
    given.held_launch = &graph;
    return;
  }
  if (meant(Fault::Act::launch_elsewhere, stream, Mark::launch, 0) && ++launches_ % 2 == 0) {
    inner().launch(graph, spare_);
    return;
  }
  inner().launch(graph, stream);
  if (fault_.act == Fault::Act::launch_elsewhere && armed_ && Site::innermost()->phase() == "backward") {
    inner().record(spare_event_, stream);
    inner().wait(spare_, spare_event_);
  }
}

std::vector<GraphNode> PlantedRuntime::nodes(const Graph& graph) const {
  std::vector<GraphNode> nodes = inner().nodes(graph);
  if (blind_ && (fault_.in_capture() || joined_late_)) {
    for (std::size_t node = 0; node < nodes.size(); ++node) {
      for (std::uint32_t other = 0; other < nodes.size(); ++other) {
        if (other != node) {
          nodes[node].predecessors.push_back(other);
        }
      }
    }
  }
  return nodes;
}

}  // namespace sidestream::testing_model
