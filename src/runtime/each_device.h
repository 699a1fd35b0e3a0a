#pragma once
#include <map>
#include <mutex>
#include <utility>

#include <c10/core/Device.h>

namespace sidestream {

/// The object of `device`, for the life of the process. `make` returns a new one; the first call for a device uses it.
/// Threads: any. Throws: as `make`; the next call then tries again.
template <class T, class Make>
[[nodiscard]] T& of_device(c10::Device device, const Make& make) {
  static auto* const mutex = new std::mutex();
  static auto* const all = new std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, T*>();
  const std::lock_guard lock(*mutex);
  T*& one = (*all)[{device.type(), device.index()}];
  if (one == nullptr) {
    one = make();
  }
  return *one;
}

}  // namespace sidestream
