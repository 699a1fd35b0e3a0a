#pragma once
#include "sim/device/device.h"

namespace sidestream::sim {

/// Is told of the work that the device keeps, as it is issued. Set it as `Device::State::listener`.
/// Threads: the issuing one, under the device's lock.
class WorkListener {
 public:
  WorkListener() = default;
  WorkListener(const WorkListener&) = delete;
  WorkListener& operator=(const WorkListener&) = delete;
  virtual ~WorkListener() = default;

  /// A copy between host and device, alone or as a node of a launched graph: it has not run yet.
  virtual void issued_copy(const Work& copy) = 0;
};

}  // namespace sidestream::sim
