#include "runtime/capture_turn.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <torch/csrc/autograd/graph_task.h>

#include "runtime/debug_info_kinds.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// The captures of this process.
struct Turns {
  std::mutex mutex;
  std::condition_variable ended;
  std::vector<c10::Device> held;
  std::atomic<int> count{0};

  [[nodiscard]] bool has(c10::Device device) const { return std::find(held.begin(), held.end(), device) != held.end(); }
};

Turns& turns() {
  static auto* const instance = new Turns();  // threads may end after statics are destroyed
  return *instance;
}

[[nodiscard]] bool in_a_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

std::string wait_elsewhere(c10::Device device) {
  return " while another thread captures graphs on " + device.str() +
         ", and a backward pass cannot wait for that: the capture may need its thread. Let the threads' captures end "
         "first: run two steps of each engine before the threads train at the same time";
}

}  // namespace

/// Passed on with the thread-local state: the devices whose turns the thread has.
struct CaptureTurn::Work final : c10::DebugInfoBase {
  explicit Work(Devices devices_) : devices(std::move(devices_)) {}
  const Devices devices;
};

CaptureTurn::Devices CaptureTurn::of_this_thread() {
  const auto* const work = static_cast<const Work*>(c10::ThreadLocalDebugInfo::get(DebugInfoKinds::capture_turn));
  return work == nullptr ? Devices() : work->devices;
}

bool CaptureTurn::mine(c10::Device device) noexcept {
  const auto* const work = static_cast<const Work*>(c10::ThreadLocalDebugInfo::get(DebugInfoKinds::capture_turn));
  return work != nullptr && std::find(work->devices.begin(), work->devices.end(), device) != work->devices.end();
}

CaptureTurn::CaptureTurn(c10::Device device)
    : device_(device), nested_(mine(device)), carried_(DebugInfoKinds::capture_turn, [&] {
        Devices devices = of_this_thread();
        devices.push_back(device);
        return std::make_shared<Work>(std::move(devices));
      }()) {
  if (nested_) {
    return;
  }
  Turns& all = turns();
  std::unique_lock lock(all.mutex);
  if (all.has(device)) {
    if (of_this_thread().size() > 1) {
      throw UsageError("graphs are captured on " + device.str() +
                       " inside a capture on another device, while another thread " + "captures on " + device.str() +
                       ". Two such threads would wait for each other; capture one engine after the other");
    }
    if (in_a_backward()) {
      throw UsageError("graphs are to be captured" + wait_elsewhere(device));
    }
    all.ended.wait(lock, [&] { return !all.has(device); });
  }
  all.held.push_back(device);
  all.count.fetch_add(1, std::memory_order_release);
}

CaptureTurn::~CaptureTurn() {
  if (nested_) {
    return;
  }
  Turns& all = turns();
  {
    const std::lock_guard lock(all.mutex);
    all.held.erase(std::find(all.held.begin(), all.held.end(), device_));
    all.count.fetch_sub(1, std::memory_order_release);
  }
  all.ended.notify_all();
}

bool CaptureTurn::others(c10::Device device) {
  Turns& all = turns();
  if (all.count.load(std::memory_order_acquire) == 0) [[likely]] {
    return false;
  }
  const std::lock_guard lock(all.mutex);
  return all.has(device) && !mine(device);
}

bool CaptureTurn::let_others_finish(c10::Device device) {
  Turns& all = turns();
  if (all.count.load(std::memory_order_acquire) == 0) [[likely]] {
    return true;
  }
  std::unique_lock lock(all.mutex);
  if (!all.has(device) || mine(device)) {
    return true;
  }
  if (in_a_backward() || c10::ThreadLocalDebugInfo::get(DebugInfoKinds::capture_turn) != nullptr) {
    return false;
  }
  all.ended.wait(lock, [&] { return !all.has(device); });
  return true;
}

void CaptureTurn::let_others_finish(c10::Device device, const char* what) {
  if (!let_others_finish(device)) {
    throw UsageError(std::string(what) + wait_elsewhere(device));
  }
}

}  // namespace sidestream
