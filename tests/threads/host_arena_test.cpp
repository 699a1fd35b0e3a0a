#include "memory/host_arena.h"

#include <atomic>
#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "threads/at_once.h"
#include "threads/locked_runtime.h"

namespace sidestream {
namespace {

using test::at_once;
using test::LockedRuntime;

TEST(HostArenaThreads, SlotsGoFromThreadToThreadWithTheirEvents) {
  LockedRuntime runtime;
  HostArena arena(runtime, 1 << 20);
  const std::vector<std::size_t> sizes{512, 512, 4096, 4096, 1000};
  arena.plan(sizes);
  arena.seal();
  std::atomic<bool> clashed = false;
  at_once(4, [&](int number) {
    const c10::Stream stream = LockedRuntime::stream(number);
    const auto event = std::make_shared<const Event>(runtime.create_event(EventTiming::off));
    const auto mark = static_cast<unsigned char>(number + 1);
    for (int i = 0; i < 1000; ++i) {
      HostArena::Lease lease = arena.lease(sizes[static_cast<std::size_t>(i) % sizes.size()]);
      if (!lease) {
        continue;
      }
      lease.wait_before_use(stream);
      std::memset(lease.data(), mark, lease.bytes());
      runtime.record(*event, stream);
      lease.record_last_use(event);
      clashed = clashed || lease.data()[lease.bytes() - 1] != std::byte{mark};
    }
  });
  EXPECT_FALSE(clashed);
  EXPECT_EQ(arena.stats().live_leases, 0U);
  EXPECT_EQ(arena.stats().allocations_after_seal, 0U);
}

TEST(HostArenaThreads, PlanningAndAskingMayMeet) {
  LockedRuntime runtime;
  HostArena arena(runtime, 64 << 10);
  std::atomic<bool> beyond = false;
  at_once(4, [&](int number) {
    const std::vector<std::size_t> sizes{512, 700};
    for (int i = 0; i < 200; ++i) {
      if (number == 0) {
        arena.prepare(sizes);
      } else {
        const HostArena::Lease lease = arena.lease(number == 1 ? 512 : 700);
        beyond = beyond || arena.stats().pinned > arena.stats().cap || arena.available() > arena.stats().cap;
      }
    }
  });
  EXPECT_FALSE(beyond);
  EXPECT_EQ(arena.stats().leased, 0U);
}

TEST(HostArenaThreads, TheLastLeaseMayOutliveTheArenaOnAnotherThread) {
  LockedRuntime runtime;
  for (int i = 0; i < 100; ++i) {
    std::optional<HostArena> arena(std::in_place, runtime, 1 << 16);
    std::vector<HostArena::Lease> leases;
    for (int number = 0; number < 3; ++number) {
      leases.push_back(arena->lease(512));
    }
    at_once(4, [&](int number) {
      if (number == 3) {
        arena.reset();
      } else {
        HostArena::Lease& lease = leases[static_cast<std::size_t>(number)];
        lease.record_last_use(std::make_shared<const Event>(runtime.create_event(EventTiming::off)));
        lease.reset();
      }
    });
  }
  EXPECT_EQ(runtime.pinned_live, 0U);
}

}  // namespace
}  // namespace sidestream
