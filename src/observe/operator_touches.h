#pragma once
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/SmallVector.h>

#include "observe/operator_observer.h"
#include "sidestream/journal.h"

namespace sidestream {

/// The bytes that one operator touched, told apart by who touches them: its stream, or the host at the call.
struct OperatorTouches {
  JournalKind kind = JournalKind::compute;
  std::vector<JournalAccess> by_stream;
  std::vector<JournalAccess> by_host;      ///< pinned memory only: the device sees no other memory of the host
  bool host_waits = false;                 ///< its result is on the host when it returns
  c10::SmallVector<at::Tensor, 2> pinned;  ///< host tensors that its stream touches after it has returned
};

/// Views, and names that autograd gives for one, touch nothing. Threads: any.
[[nodiscard]] OperatorTouches touches_of(const OperatorAccess& access, c10::Device device);

}  // namespace sidestream
