#include "sidestream/device.h"

#include <memory>
#include <utility>

#include "runtime/device_listener.h"
#include "runtime/host_waits.h"
#include "runtime/link_speed.h"
#include "runtime/live_memory.h"
#include "runtime/runtime.h"

namespace sidestream {

DeviceSummary describe(c10::Device device) {
  DeviceInfo info = make_runtime(device)->info();
  return {std::move(info.name), std::move(info.driver), info.memory_bytes};
}

MemoryUse memory_use(c10::Device device) {
  const LiveMemory::Use use = LiveMemory::of(device).use(*make_runtime(device));
  const MemoryStats& stats = use.allocator;
  return {use.live, use.live_peak, stats.allocated, stats.allocated_peak, stats.reserved, stats.reserved_peak};
}

void reset_memory_peaks(c10::Device device) { LiveMemory::of(device).restart(*make_runtime(device)); }

void release_cached_memory(c10::Device device) {
  host_waits::tell(device.type(), HostWait::device, "sidestream::release_cached_memory");
  make_runtime(device)->release_cached_memory();
}

void synchronize(c10::Device device) {
  const std::shared_ptr<Runtime> runtime = make_runtime(device);
  host_waits::tell(device.type(), HostWait::device, "sidestream::synchronize");
  runtime->synchronize_device();
  device_listeners::host_saw_device(runtime->device());
}

LinkSpeed measure_link(c10::Device device, std::size_t bytes) { return link_speed(*make_runtime(device), bytes); }

}  // namespace sidestream
