#pragma once
#include <cstddef>

#include <c10/core/Device.h>

#include "runtime/stream_key.h"
#include "sidestream/detail/export.h"

namespace sidestream {

/// Hears of the order that is asked of a device past every Runtime: by streams and events of LibTorch that a model or autograd
/// uses, and by the allocator.
/// Threads: called on the thread that asked, after the device was; it must not call the device back, nor throw.
class DeviceListener {
 public:
  DeviceListener() = default;
  DeviceListener(const DeviceListener&) = delete;
  DeviceListener& operator=(const DeviceListener&) = delete;
  virtual ~DeviceListener() = default;

  virtual void recorded(const void* event, StreamKey stream) = 0;
  virtual void waited(StreamKey stream, const void* event) = 0;
  virtual void host_saw_event(const void* event) = 0;
  virtual void host_saw_stream(StreamKey stream) = 0;
  virtual void host_saw_device(c10::Device device) = 0;
  /// The memory was freed, and is handed out again only when what `stream` was given by now is done.
  virtual void freed_behind(StreamKey stream, const void* begin, std::size_t bytes) = 0;
};

/// While it lives, `listener` hears of devices of one type. Backends have LibTorch's seams process-wide, so this is too.
/// Threads: any. The listener is not called after the end.
class [[nodiscard]] ListeningGuard {
 public:
  ListeningGuard(c10::DeviceType type, DeviceListener& listener);
  ListeningGuard(const ListeningGuard&) = delete;
  ListeningGuard& operator=(const ListeningGuard&) = delete;
  ~ListeningGuard();

 private:
  DeviceListener& listener_;
};

/// For backends: what they tell all listeners of their type. With none it costs one load.
namespace device_listeners {

SIDESTREAM_API void recorded(c10::DeviceType type, const void* event, StreamKey stream);
SIDESTREAM_API void waited(c10::DeviceType type, StreamKey stream, const void* event);
SIDESTREAM_API void host_saw_event(c10::DeviceType type, const void* event);
SIDESTREAM_API void host_saw_stream(c10::DeviceType type, StreamKey stream);
SIDESTREAM_API void host_saw_device(c10::Device device);
SIDESTREAM_API void freed_behind(c10::DeviceType type, StreamKey stream, const void* begin, std::size_t bytes);

}  // namespace device_listeners

}  // namespace sidestream
