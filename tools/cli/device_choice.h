#pragma once
#include <string>

#include <c10/core/Device.h>

#include "tools/cli/training_options.h"

namespace sidestream::cli {

struct ChosenDevice {
  c10::Device device;
  std::string name;
};

/// The device that --device names; `auto` is cuda where it works and no schedule is asked for, else sim. The schedule is set on it.
/// With --compare on cuda, LibTorch's deterministic algorithms are switched on for the process.
/// Throws: DeviceError where --device cuda finds no usable driver.
[[nodiscard]] ChosenDevice choose_device(const TrainingOptions& options);

}  // namespace sidestream::cli
