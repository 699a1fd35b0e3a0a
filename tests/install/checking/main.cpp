// A test of a trainer against the installed tree: two operators on two streams, with and without the wait between them.
#include <sidestream/device.h>
#include <sidestream/testing/schedule_check.h>
#include <sidestream/testing/simulator.h>

#include <ATen/ops/add.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <iostream>

namespace ss = sidestream;

namespace {

/// What schedules find in: y = 2x on the current stream, z = y + 1 on another.
std::int64_t divergences(c10::Device device, bool waits) {
  const c10::impl::VirtualGuardImpl streams(device.type());
  const c10::Stream main = streams.getStream(device);
  const c10::Stream side = streams.getNewStream(device);
  const at::Tensor x = at::ones({64}, device);
  ss::synchronize(device);
  ss::ScheduleCheck check(device);
  const at::Tensor y = at::mul(x, 2);
  c10::Event made(device.type());
  made.record(main);
  if (waits) {
    made.block(side);
  }
  at::Tensor z;
  {
    const c10::StreamGuard guard(side);
    z = at::add(y, 1);
  }
  check.stop({{"z", z}});
  return check.search(50).diverged;
}

}  // namespace

int main() {
  const c10::Device device = ss::find_device("sim");
  ss::set_schedule(device, ss::Schedule::parse("late"));
  ss::set_schedule(device, ss::Schedule());
  const std::int64_t right = divergences(device, true);
  const std::int64_t wrong = divergences(device, false);
  std::cout << right << " divergences with the wait, " << wrong << " without it\n";
  return right == 0 && wrong > 0 ? 0 : 1;
}
