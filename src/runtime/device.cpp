#include "sidestream/device.h"

#include "runtime/foreign_order.h"
#include "runtime/link_speed.h"
#include "runtime/runtime.h"
#include "sidestream/error.h"
#include "sim/device/device.h"
#include "sim/torch/registration.h"

namespace sidestream {
namespace {

bool has_cuda() {
  try {
    (void)make_runtime(c10::Device(c10::DeviceType::CUDA, 0));
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

c10::Device find_device(const std::string& name) {
  if (name == "sim" || (name == "auto" && !has_cuda())) {
    sim::register_sim_device();
    return {c10::DeviceType::PrivateUse1, 0};
  }
  if (name == "auto") {
    return {c10::DeviceType::CUDA, 0};
  }
  if (name == "cuda" || name.compare(0, 5, "cuda:") == 0) {
    c10::Device device(c10::DeviceType::CUDA, 0);
    if (name != "cuda") {
      try {
        device = c10::Device(name);
      } catch (const std::exception&) {
        throw UsageError("device \"" + name + "\" is not of the form cuda:N");
      }
    }
    (void)make_runtime(device);
    return device;
  }
  throw UsageError("there is no device \"" + name + "\"; use auto, cuda, cuda:N or sim");
}

DeviceSummary describe(c10::Device device) {
  DeviceInfo info = make_runtime(device)->info();
  return {std::move(info.name), std::move(info.driver), info.memory_bytes};
}

MemoryUse memory_use(c10::Device device) {
  const MemoryStats stats = make_runtime(device)->memory_stats();
  return {stats.allocated, stats.allocated_peak, stats.reserved, stats.reserved_peak};
}

void reset_memory_peaks(c10::Device device) { make_runtime(device)->reset_peak_memory_stats(); }

void release_cached_memory(c10::Device device) { make_runtime(device)->release_cached_memory(); }

void synchronize(c10::Device device) {
  const std::shared_ptr<Runtime> runtime = make_runtime(device);
  runtime->synchronize_device();
  foreign_order::host_saw_device(runtime->device());
}

LinkSpeed measure_link(c10::Device device, std::size_t bytes) { return link_speed(*make_runtime(device), bytes); }

void set_schedule(c10::Device device, const Schedule& schedule) {
  if (device.type() != c10::DeviceType::PrivateUse1) {
    throw UsageError("a schedule is for the sim device only; " + device.str() + " orders its work itself");
  }
  sim::register_sim_device();
  sim::Device::get().set_schedule(schedule);
}

}  // namespace sidestream
