#include "sidestream/device.h"

#include <algorithm>
#include <charconv>
#include <string_view>

#include <c10/util/Exception.h>

#include "offload/autograd_engine.h"
#include "runtime/backend.h"
#include "runtime/runtime.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// Says on one line that there is no GPU.
c10::Device simulate_because(const std::string& reason) {
  TORCH_WARN("sidestream: training is simulated on the CPU (device sim): ", reason);
  return find_device("sim");
}

c10::Device first_gpu_or_simulator() {
  std::string reasons;
  for (const Backend& backend : loaded_backends()) {
    if (backend.simulated) {
      continue;
    }
    const Availability found = backend.availability();
    switch (found.state) {
      case Availability::State::usable:
        return make_runtime(c10::Device(backend.type, 0))->device();
      case Availability::State::broken:
        throw DeviceError("device auto: " + found.reason + "; fix this, or use find_device(\"sim\")");
      case Availability::State::absent:
        reasons += (reasons.empty() ? "" : "; ") + found.reason;
    }
  }
  return simulate_because(reasons.empty() ? "this build has no other backend" : reasons);
}

/// "cuda" or "cuda:N" as a device of `backend`.
c10::Device device_of(const Backend& backend, const std::string& name) {
  const std::string_view index =
      std::string_view(name).substr(std::min(name.size(), std::string(backend.name).size() + 1));
  c10::DeviceIndex number = 0;
  const auto read = std::from_chars(index.data(), index.data() + index.size(), number);
  const bool whole = read.ec == std::errc() && read.ptr == index.data() + index.size() && number >= 0;
  if (name != backend.name && !whole) {
    throw UsageError("device \"" + name + "\" is not of the form " + backend.name + ":N");
  }
  return {backend.type, number};
}

}  // namespace

c10::Device find_device(const std::string& name) {
  if (name == "auto") {
    return first_gpu_or_simulator();
  }
  const std::string family = name.substr(0, name.find(':'));
  const Backend* const backend = family == "sim" ? &load_simulator() : find_backend(family);
  if (backend == nullptr) {
    throw UsageError("there is no device \"" + name + "\"; use auto, cuda, cuda:N or sim");
  }
  const c10::Device device = make_runtime(device_of(*backend, name))->device();
  if (backend->simulated) {
    install_autograd_engine();  // backward on a device that is new to LibTorch needs threads that only this engine starts
  }
  return device;
}

}  // namespace sidestream
