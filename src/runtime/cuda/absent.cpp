// Built in place of the backend if LibTorch has no CUDA or its headers are missing.
#include "runtime/backend.h"
#include "sidestream/error.h"

namespace sidestream::cuda {
namespace {

constexpr const char* left_out =
    "this build of Sidestream has no cuda backend (the summary of meson setup says why: a LibTorch without CUDA, no "
    "CUDA headers, or -Dcuda=disabled)";

Availability availability() { return {Availability::State::absent, left_out}; }

std::shared_ptr<Runtime> make(c10::Device device) {
  throw UsageError("device " + device.str() + " needs the cuda backend, and " + left_out +
                   "; the simulated device works without it: find_device(\"sim\")");
}

void observe() {}

std::string tell_waits() { return {}; }
void leave_waits() noexcept {}

const BackendRegistration registration({"cuda", c10::DeviceType::CUDA, false, availability, make, observe, tell_waits,
                                        leave_waits});

}  // namespace
}  // namespace sidestream::cuda
