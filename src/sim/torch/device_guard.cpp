#include "sim/torch/device_guard.h"

#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/intrusive_ptr.h>
#include <sidestream/error.h>

#include "runtime/device_listener.h"
#include "runtime/host_waits.h"
#include "runtime/replayed_memory.h"
#include "sim/device/device.h"

namespace sidestream::sim {
namespace {

EventState& as_event(void* event) { return *static_cast<EventState*>(event); }

/// LibTorch's view of the device's streams and events: stream guards, and autograd's waits between a node's stream and its
/// consumer's.
class DeviceGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kDeviceType; }
  c10::Device exchangeDevice(c10::Device /*device*/) const override { return sim_device(); }
  c10::Device getDevice() const override { return sim_device(); }
  void setDevice(c10::Device device) const override { check_index(device); }
  void uncheckedSetDevice(c10::Device /*device*/) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device /*device*/) const override { return as_stream(current_stream()); }
  c10::Stream getDefaultStream(c10::Device /*device*/) const override { return as_stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    check_index(device);
    return as_stream(Device::get().create_stream());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::StreamId before = current_stream();
    set_current_stream(stream.id());
    return as_stream(before);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream& stream) const override {
    const bool idle = Device::get().idle(stream.id());
    if (idle) {
      device_listeners::host_saw_stream(kDeviceType, key_of(stream));
    }
    return idle;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits::tell(kDeviceType, HostWait::stream, "synchronize of a stream");
    Device::get().synchronize(stream.id());
    device_listeners::host_saw_stream(kDeviceType, key_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex /*index*/) const override {
    host_waits::tell(kDeviceType, HostWait::device, "synchronize of the device");
    Device::get().synchronize();
    device_listeners::host_saw_device(sim_device());
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Device::get().used_on(data.get(), stream.id());
    ReplayedMemory::used_on(data, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex /*index*/,
              const c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) {
      *event = c10::make_intrusive<EventState>(false).release();
    }
    Device::get().record(as_event(*event), stream.id());
    device_listeners::recorded(kDeviceType, *event, key_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      Device::get().wait(stream.id(), as_event(event));
      device_listeners::waited(kDeviceType, key_of(stream), event);
    }
  }
  bool queryEvent(void* event) const override {
    const bool done = event == nullptr || Device::get().query(as_event(event));
    if (done && event != nullptr) {
      device_listeners::host_saw_event(kDeviceType, event);
    }
    return done;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      host_waits::tell(kDeviceType, HostWait::event, "synchronize of an event");
      Device::get().synchronize(as_event(event));
      device_listeners::host_saw_event(kDeviceType, event);
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*index*/) const noexcept override {
    if (event != nullptr) {
      c10::intrusive_ptr<EventState>::reclaim(&as_event(event)).reset();
    }
  }
};

const DeviceGuard* the_guard() {
  static const auto* const guard = new DeviceGuard();  // LibTorch keeps the pointer for the life of the process
  return guard;
}

}  // namespace

void check_index(c10::Device device) {
  if (device.index() > 0) {
    throw UsageError("there is one sim device: sim:" + std::to_string(device.index()) + " does not exist; use sim:0");
  }
}

void register_device_guard() { c10::impl::registerDeviceGuard(kDeviceType, the_guard()); }

}  // namespace sidestream::sim
