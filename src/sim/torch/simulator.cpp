#include "sidestream/testing/simulator.h"

#include "sidestream/error.h"
#include "sim/device/device.h"
#include "sim/torch/device_guard.h"
#include "sim/torch/registration.h"

namespace sidestream {
namespace {

sim::Device& simulator(c10::Device device) {
  if (device.type() != sim::kDeviceType) {
    throw UsageError("schedules and limits are for the sim device only, and " + device.str() +
                     " is another; use find_device(\"sim\")");
  }
  sim::register_sim_device();
  return sim::Device::get();
}

}  // namespace

void set_schedule(c10::Device sim, const Schedule& schedule) { simulator(sim).set_schedule(schedule); }

void set_memory_limit(c10::Device sim, std::size_t bytes) { simulator(sim).set_memory_limit(bytes); }

void set_pinned_limit(c10::Device sim, std::size_t bytes) { simulator(sim).set_pinned_limit(bytes); }

void set_strict_waits(c10::Device sim, bool strict) { simulator(sim).set_strict(strict); }

}  // namespace sidestream
