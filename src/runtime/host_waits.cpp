#include "runtime/host_waits.h"

#include <atomic>

namespace sidestream {
namespace {

std::atomic<host_waits::Heard> listener{nullptr};

}  // namespace

thread_local constinit int OwnWaits::depth_ = 0;

namespace host_waits {

void set_listener(Heard heard) noexcept { listener.store(heard, std::memory_order_release); }

void tell(c10::DeviceType type, HostWait kind, const char* call) noexcept {
  const Heard heard = listener.load(std::memory_order_acquire);
  if (heard != nullptr && !OwnWaits::active()) {
    heard(type, kind, call);
  }
}

}  // namespace host_waits

}  // namespace sidestream
