#pragma once
#include <cstdint>

#include <c10/core/Device.h>

#include "sidestream/detail/export.h"

namespace sidestream {

/// Calls that make the host wait, or ask the driver for memory, in a program that otherwise only queues work.
enum class HostWait : std::uint8_t {
  value,           ///< of a tensor, which the host reads
  data_dependent,  ///< an operator whose result's shape the host must know. A backend may tell it of any result, also of a value
  blocking_copy,
  pageable_copy,  ///< from or to host memory that is not pinned
  event,
  stream,
  device,
  allocation,  ///< of device memory, which the caching allocator did not have
  pinning,     ///< of host memory that was not pinned yet, or the end of it
};

/// Waits that bypass every Runtime: backends report them, and listeners hear of them. Process-wide, as LibTorch's hooks are.
namespace host_waits {

/// A listener. Lives as long as the process.
struct Listener {
  /// Called on the thread that waits, before it does, maybe under a lock of the device: it must not call the device back.
  /// `call` is the operator's or the driver's name for it; it lives as long as the process.
  void (*heard)(c10::DeviceType type, HostWait kind, const char* call) noexcept;
  /// Whether it wants to hear of the calling thread now.
  bool (*listens)() noexcept;
};

/// From here on `listener` is told; null: no listener. Threads: any.
SIDESTREAM_API void set_listener(const Listener* listener) noexcept;
/// For backends: whether the calling thread has a listener. Ask before finding out what to report. Allocates nothing.
[[nodiscard]] SIDESTREAM_API bool heard() noexcept;
/// For backends. With no listener it costs one load; nothing is told while an OwnWaits of the thread lives.
SIDESTREAM_API void tell(c10::DeviceType type, HostWait kind, const char* call) noexcept;

}  // namespace host_waits

/// While it lives, waits of the calling thread are the library's own, and not told.
class [[nodiscard]] SIDESTREAM_API OwnWaits {
 public:
  OwnWaits() noexcept { ++depth_; }
  OwnWaits(const OwnWaits&) = delete;
  OwnWaits& operator=(const OwnWaits&) = delete;
  ~OwnWaits() { --depth_; }

  [[nodiscard]] static bool active() noexcept { return depth_ > 0; }

 private:
  static thread_local constinit int depth_;
};

}  // namespace sidestream
