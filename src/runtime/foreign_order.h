#pragma once
#include <cstddef>
#include <cstdint>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace sidestream {

/// The same number for the same stream, whoever names it: LibTorch may have several ids for one stream of the driver.
using StreamKey = std::int64_t;
[[nodiscard]] StreamKey key_of(c10::Stream stream);
/// By the driver's handle; `native` is null for the default stream of `device`.
[[nodiscard]] StreamKey key_of(const void* native, c10::DeviceIndex device) noexcept;

/// Hears of the order that is asked of a device past every Runtime: by streams and events of LibTorch that a model or autograd
/// uses, and by the allocator.
/// Threads: called on the thread that asked, after the device was; it must not call the device back, nor throw.
class ForeignOrder {
 public:
  ForeignOrder() = default;
  ForeignOrder(const ForeignOrder&) = delete;
  ForeignOrder& operator=(const ForeignOrder&) = delete;
  virtual ~ForeignOrder() = default;

  virtual void recorded(const void* event, StreamKey stream) = 0;
  virtual void waited(StreamKey stream, const void* event) = 0;
  virtual void host_saw_event(const void* event) = 0;
  virtual void host_saw_stream(StreamKey stream) = 0;
  virtual void host_saw_device(c10::Device device) = 0;
  /// The memory was freed, and is lent again only when what `stream` was given by now is done.
  virtual void freed_behind(StreamKey stream, const void* begin, std::size_t bytes) = 0;
};

/// While it lives, `listener` hears of devices of one type. Backends have LibTorch's seams process-wide, so this is too.
/// Threads: any. The listener is not called after the end.
class [[nodiscard]] ListeningGuard {
 public:
  ListeningGuard(c10::DeviceType type, ForeignOrder& listener);
  ListeningGuard(const ListeningGuard&) = delete;
  ListeningGuard& operator=(const ListeningGuard&) = delete;
  ~ListeningGuard();

 private:
  ForeignOrder& listener_;
};

/// For backends: what they tell all listeners of their type. With none it costs one load.
namespace foreign_order {

void recorded(c10::DeviceType type, const void* event, StreamKey stream);
void waited(c10::DeviceType type, StreamKey stream, const void* event);
void host_saw_event(c10::DeviceType type, const void* event);
void host_saw_stream(c10::DeviceType type, StreamKey stream);
void host_saw_device(c10::Device device);
void freed_behind(c10::DeviceType type, StreamKey stream, const void* begin, std::size_t bytes);

}  // namespace foreign_order

}  // namespace sidestream
