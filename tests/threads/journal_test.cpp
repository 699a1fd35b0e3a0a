#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>

#include "base/site.h"
#include "observe/checked_runtime.h"
#include "threads/at_once.h"
#include "threads/locked_runtime.h"

namespace sidestream {
namespace {

using test::at_once;
using test::LockedRuntime;

/// The journal tells streams by their native handles.
struct NumberedStreams final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::PrivateUse1> {
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(0x1000 + stream.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, NumberedStreams)

c10::Stream stream_of(c10::StreamId number) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::PrivateUse1, 0), number);
}

TEST(JournalThreads, OneJournalIsWrittenByMany) {
  const auto inner = std::make_shared<LockedRuntime>();
  CheckedRuntime runtime(inner);
  runtime.begin_step(1);
  constexpr int kThreads = 4;
  constexpr int kRounds = 200;
  std::vector<std::byte> device(kThreads * 64);
  std::vector<std::byte> host(kThreads * 64);
  at_once(kThreads, [&](int number) {
    const SiteName name("blocks." + std::to_string(number));
    const c10::Stream stream = stream_of(2 * number + 1);
    const c10::Stream copies = stream_of(2 * number + 2);
    const Event event = runtime.create_event(EventTiming::off);
    std::byte* const own_device = device.data() + std::ptrdiff_t{64} * number;
    std::byte* const own_host = host.data() + std::ptrdiff_t{64} * number;
    for (int i = 0; i < kRounds; ++i) {
      const Site site(Activity::offload, name);
      runtime.record(event, stream);
      runtime.wait(copies, event);
      runtime.copy_to_host(own_host, own_device, 64, copies);
      runtime.record(event, copies);
      runtime.wait(stream, event);
      runtime.copy_to_device(own_device, own_host, 64, stream);
      if (i % 50 == 0) {
        (void)runtime.findings();
        (void)runtime.operations();
        runtime.begin_step(2);
      }
    }
    runtime.synchronize(stream);
  });
  EXPECT_EQ(runtime.findings(), std::vector<std::string>());
  EXPECT_EQ(runtime.operations(), static_cast<std::uint64_t>(kThreads) * (kRounds * 6 + 1));
  EXPECT_EQ(check_order(runtime.journal()), std::vector<std::string>());
}

}  // namespace
}  // namespace sidestream
