#pragma once

#include <c10/core/Device.h>
#include <c10/util/SmallVector.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "sidestream/detail/export.h"

namespace sidestream {

/// The right to warm up and to capture on a device, for its lifetime: one thread of the process has it at a time, whatever engines
/// there are, since the device has one generator and one idle state. Another thread's waits.
///
/// Autograd's threads that run a backward pass of the thread that has it work for it (`mine`): the turn travels with LibTorch's
/// thread-local state, as an operator observer does. It nests on such a thread. A thread that has a turn waits for no other device's.
/// Threads: ends on the thread it began on.  Throws: UsageError if waiting might never end: in a backward pass (its thread may be
/// the one that the other capture needs) and with another device's turn in hand.
class [[nodiscard]] SIDESTREAM_API CaptureTurn {
 public:
  explicit CaptureTurn(c10::Device device);
  CaptureTurn(const CaptureTurn&) = delete;
  CaptureTurn& operator=(const CaptureTurn&) = delete;
  ~CaptureTurn();

  /// True if the calling thread captures on `device`, or works for the thread that does.
  [[nodiscard]] static bool mine(c10::Device device) noexcept;
  /// True while another thread has the turn of `device`.
  [[nodiscard]] static bool others(c10::Device device);
  /// Waits until no other thread has the turn of `device`: for what must not meet another thread's capture. False if it may not
  /// wait (see above). With no turn in the process it costs one load.
  [[nodiscard]] static bool let_others_finish(c10::Device device);
  /// The same. Throws: UsageError that names `what` where it may not wait.
  static void let_others_finish(c10::Device device, const char* what);

 private:
  using Devices = c10::SmallVector<c10::Device, 2>;
  struct Work;
  static Devices of_this_thread();

  c10::Device device_;
  bool nested_;
  c10::DebugInfoGuard carried_;
};

}  // namespace sidestream
