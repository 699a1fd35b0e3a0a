#include "runtime/host_waits.h"

#include <atomic>

namespace sidestream {
namespace {

std::atomic<const host_waits::Listener*> listener{nullptr};

}  // namespace

thread_local constinit int OwnWaits::depth_ = 0;

namespace host_waits {

void set_listener(const Listener* now) noexcept { listener.store(now, std::memory_order_release); }

bool heard() noexcept {
  const Listener* const now = listener.load(std::memory_order_acquire);
  return now != nullptr && !OwnWaits::active() && now->listens();
}

void tell(c10::DeviceType type, HostWait kind, const char* call) noexcept {
  const Listener* const now = listener.load(std::memory_order_acquire);
  if (now != nullptr && !OwnWaits::active()) {
    now->heard(type, kind, call);
  }
}

}  // namespace host_waits

}  // namespace sidestream
