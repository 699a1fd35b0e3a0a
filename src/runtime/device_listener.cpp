#include "runtime/device_listener.h"

#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <utility>
#include <vector>

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "runtime/backend.h"

namespace sidestream {
namespace {

struct Listeners {
  std::atomic<int> count{0};
  std::shared_mutex mutex;
  std::vector<std::pair<c10::DeviceType, DeviceListener*>> all;
};

Listeners& listeners() {
  static auto* const instance = new Listeners();  // LibTorch destroys events until the very end
  return *instance;
}

template <class Tell>
void tell(c10::DeviceType type, Tell each) {
  Listeners& to = listeners();
  if (to.count.load(std::memory_order_acquire) == 0) [[likely]] {
    return;
  }
  const std::shared_lock lock(to.mutex);
  for (const auto& [of, listener] : to.all) {
    if (of == type) {
      each(*listener);
    }
  }
}

}  // namespace

StreamKey key_of(c10::Stream stream) {
  const auto* guard = c10::impl::getDeviceGuardImpl(stream.device_type());
  return key_of(guard->getStreamNativeHandle(stream), stream.device_index());
}

// No handle is as small as a device's index.
StreamKey key_of(const void* native, c10::DeviceIndex device) noexcept {
  return native == nullptr ? device : reinterpret_cast<StreamKey>(native);
}

ListeningGuard::ListeningGuard(c10::DeviceType type, DeviceListener& listener) : listener_(listener) {
  if (const Backend* backend = find_backend(type); backend != nullptr) {
    backend->observe();
  }
  Listeners& to = listeners();
  const std::unique_lock lock(to.mutex);
  to.all.emplace_back(type, &listener);
  ++to.count;
}

ListeningGuard::~ListeningGuard() {
  Listeners& to = listeners();
  const std::unique_lock lock(to.mutex);
  std::erase_if(to.all, [&](const auto& entry) { return entry.second == &listener_; });
  --to.count;
}

namespace device_listeners {

void recorded(c10::DeviceType type, const void* event, StreamKey stream) {
  tell(type, [&](DeviceListener& to) { to.recorded(event, stream); });
}
void waited(c10::DeviceType type, StreamKey stream, const void* event) {
  tell(type, [&](DeviceListener& to) { to.waited(stream, event); });
}
void host_saw_event(c10::DeviceType type, const void* event) {
  tell(type, [&](DeviceListener& to) { to.host_saw_event(event); });
}
void host_saw_stream(c10::DeviceType type, StreamKey stream) {
  tell(type, [&](DeviceListener& to) { to.host_saw_stream(stream); });
}
void host_saw_device(c10::Device device) {
  tell(device.type(), [&](DeviceListener& to) { to.host_saw_device(device); });
}
void freed_behind(c10::DeviceType type, StreamKey stream, const void* begin, std::size_t bytes) {
  tell(type, [&](DeviceListener& to) { to.freed_behind(stream, begin, bytes); });
}

}  // namespace device_listeners

}  // namespace sidestream
