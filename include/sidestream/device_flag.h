#pragma once
#include <cstdint>
#include <memory>
#include <type_traits>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "sidestream/detail/export.h"

namespace sidestream {

class DeviceFlagState;

/// A bool or an integer in device memory that graphs read anew at each replay: what a branch on the host would freeze. The first
/// microbatch of a step, which fills a cache of casted weights, and the others, which read it, replay one capture so:
///
///     ss::DeviceFlag first(device, true);            // the callable's function owns a copy
///     at::Tensor used = at::where(first.tensor(), cast(weight), cache);
///     cache.copy_(used);                             // and the trainer, before each call: first.set(microbatch == 0)
///
/// Copies share the memory. Source: TransformerEngine's is_first_microbatch.
class SIDESTREAM_API DeviceFlag {
 public:
  /// `value` decides between a bool and a 64-bit integer. Throws: DeviceError, UsageError where `device` cannot be used.
  template <class T, class = std::enable_if_t<std::is_integral_v<T>>>
  DeviceFlag(c10::Device device, T value)
      : DeviceFlag(device, static_cast<std::int64_t>(value), std::is_same_v<T, bool>) {}

  /// A move is a copy, so no flag is ever without memory.
  DeviceFlag(const DeviceFlag&) = default;
  DeviceFlag& operator=(const DeviceFlag&) = default;
  ~DeviceFlag() = default;

  /// What calls that are made from here on read; an integer for a bool is true where it is not 0. One number; the host waits for
  /// nothing.
  /// Ordering: on the current stream, as the calls that read it.  Capture: illegal, in the body of a call too.
  /// Threads: one at a time.  Throws: UsageError in a capture, which would set it at each replay. A backward that reads the flag
  /// throws as LibTorch does where it was set since its forward.
  void set(std::int64_t value);
  /// What was set last. No synchronisation.
  [[nodiscard]] std::int64_t value() const noexcept;
  /// A scalar on the device, for bodies to read; never written but by `set`.
  [[nodiscard]] const at::Tensor& tensor() const noexcept;

 private:
  DeviceFlag(c10::Device device, std::int64_t value, bool is_bool);
  std::shared_ptr<DeviceFlagState> state_;  ///< by copies
};

}  // namespace sidestream
