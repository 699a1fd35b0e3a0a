#pragma once
#include <cstdint>
#include <memory>
#include <type_traits>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "sidestream/detail/export.h"

namespace sidestream {

class DeviceFlagState;

/// A bool or an integer in device memory, which graphs read anew at each replay. A branch on the host would be frozen instead.
///
/// Example: the first microbatch of a step fills a cache of cast weights, and the other microbatches read it. One capture serves
/// both:
///
///     ss::DeviceFlag first(device, true);            // the callable's function owns a copy
///     at::Tensor used = at::where(first.tensor(), cast(weight), cache);
///     cache.copy_(used);                             // and the trainer, before each call: first.set(microbatch == 0)
///
/// Copies of a DeviceFlag share the memory.  Threads: one at a time.  Source: TransformerEngine's is_first_microbatch.
class SIDESTREAM_API DeviceFlag {
 public:
  /// Makes a bool if `value` is a bool, else a 64-bit integer.  Throws: DeviceError or UsageError if `device` cannot be used.
  template <class T, class = std::enable_if_t<std::is_integral_v<T>>>
  DeviceFlag(c10::Device device, T value)
      : DeviceFlag(device, static_cast<std::int64_t>(value), std::is_same_v<T, bool>) {}

  /// A copy shares the memory. A move is a copy too, so every flag has memory.
  DeviceFlag(const DeviceFlag&) = default;
  /// Shares the memory of the other flag from here on.
  DeviceFlag& operator=(const DeviceFlag&) = default;
  ~DeviceFlag() = default;

  /// Sets the value that later calls read. A bool becomes true for any value but 0. The host does not wait.
  /// Ordering: a write on the current stream, which must be the stream of the calls that read the flag.
  /// Capture: illegal, also in the body of a call.
  /// Throws: UsageError in a capture, because the graph would set the flag at each replay. If the flag is set between a forward and a
  /// backward that reads it, that backward throws LibTorch's error about an in-place change.
  void set(std::int64_t value);
  /// The value that was set last. Does not synchronise.
  [[nodiscard]] std::int64_t value() const noexcept;
  /// The flag as a tensor without dimensions on the device, for bodies to read. Only `set` may write it.
  [[nodiscard]] const at::Tensor& tensor() const noexcept;

 private:
  DeviceFlag(c10::Device device, std::int64_t value, bool is_bool);
  std::shared_ptr<DeviceFlagState> state_;  ///< shared by copies
};

}  // namespace sidestream
