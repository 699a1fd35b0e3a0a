#include "tools/cli/device_choice.h"

#include <cstdlib>

#include <ATen/Context.h>

#include "sidestream/device.h"
#include "sidestream/error.h"
#include "sidestream/testing/simulator.h"

namespace sidestream::cli {
namespace {

void switch_on_deterministic_algorithms() {
  // cuBLAS reads this when its first handle is made: with one workspace size it picks the same algorithm inside and outside of graphs.
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  at::globalContext().setDeterministicFillUninitializedMemory(false);
}

/// The device of that name. Where the library's remedy is to find the simulator, the error says how it is done here.
c10::Device named_device(const std::string& name) {
  const auto with_advice = [](const Error& error) {
    const std::string text = error.what();
    return text.find("find_device(\"sim\")") == std::string::npos ? text : text + " (here: --device sim)";
  };
  try {
    return find_device(name);
  } catch (const UsageError& error) {
    throw UsageError(with_advice(error));
  } catch (const DeviceError& error) {
    throw DeviceError(with_advice(error), error.status());
  }
}

}  // namespace

ChosenDevice choose_device(const TrainingOptions& options) {
  const bool ordered = !options.schedule.empty();
  const c10::Device device = named_device(options.device == "auto" && ordered ? "sim" : options.device);
  if (ordered) {
    set_schedule(device, Schedule::parse(options.schedule));
  }
  if (device.is_cuda() && options.compare) {
    switch_on_deterministic_algorithms();
  }
  return {device, describe(device).name};
}

}  // namespace sidestream::cli
