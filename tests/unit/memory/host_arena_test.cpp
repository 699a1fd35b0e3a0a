#include "memory/host_arena.h"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "sidestream/error.h"
#include "unit/memory/fake_runtime.h"

namespace sidestream {
namespace {

using test::FakeRuntime;
using Kind = FakeRuntime::Call::Kind;

// A copy on `stream` uses the slot.
void copied_on(HostArena::Lease& lease, FakeRuntime& runtime, std::int64_t stream) {
  const auto event = std::make_shared<const Event>(runtime.create_event(EventTiming::off));
  runtime.record(*event, FakeRuntime::stream(stream));
  lease.record_last_use(event);
}

std::vector<bool> plan(HostArena& arena, std::vector<std::size_t> sizes) { return arena.plan(sizes); }

TEST(HostArena, PinsExactBytesWithAlignedSlots) {
  FakeRuntime runtime;
  HostArena arena(runtime, 1 << 20);
  EXPECT_EQ(plan(arena, {1000, 512, 7}), (std::vector<bool>{true, true, true}));
  EXPECT_EQ(runtime.pinned_sizes, (std::vector<std::size_t>{1024 + 512 + 7}));
  const auto a = arena.lease(1000), b = arena.lease(512), c = arena.lease(7);
  for (const auto* lease : {&a, &b, &c}) {
    ASSERT_TRUE(*lease);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(lease->data()) % HostArena::alignment, 0U);
    std::memset(lease->data(), 1, lease->bytes());
  }
  EXPECT_EQ(b.data() - a.data(), 1024);
  EXPECT_EQ(arena.stats().requested, 1519U);
  EXPECT_EQ(arena.stats().pinned, 1543U);
  EXPECT_EQ(arena.stats().leased, 1519U);
}

TEST(HostArena, CapIsHard) {
  FakeRuntime runtime;
  HostArena arena(runtime, 2000);
  EXPECT_EQ(plan(arena, {1000, 1500, 900, SIZE_MAX, 100}), (std::vector<bool>{true, false, true, false, false}));
  EXPECT_EQ(arena.stats().pinned, 1924U);
  const auto one = arena.lease(1000), two = arena.lease(900);
  EXPECT_TRUE(one && two);
  EXPECT_FALSE(arena.lease(77));
  EXPECT_TRUE(arena.lease(76));
  EXPECT_EQ(arena.stats().pinned, 2000U);
  EXPECT_EQ(arena.stats().refusals, 1U);
}

TEST(HostArena, ArenasOfOneBudgetObeyItTogether) {
  FakeRuntime runtime;
  const auto budget = std::make_shared<HostBudget>(4096);
  HostArena one(runtime, budget);
  EXPECT_EQ(plan(one, {2048, 512}), (std::vector<bool>{true, true}));
  {
    HostArena other(runtime, one.budget());
    EXPECT_EQ(other.available(), 1536U);
    EXPECT_EQ(plan(other, {1024, 1024}), (std::vector<bool>{true, false}));
    EXPECT_EQ(budget->room(), 512U);
    EXPECT_FALSE(one.lease(4096));
    const auto held = other.lease(1024);
    EXPECT_TRUE(other.lease(512));
    EXPECT_EQ(budget->room(), 0U);
    EXPECT_EQ(one.stats().cap, 4096U);
  }
  EXPECT_EQ(budget->room(), 1536U);
  one.trim();
  EXPECT_EQ(budget->room(), 4096U);
}

TEST(HostArena, TrimGivesBackWhatNoLeaseIsIn) {
  FakeRuntime runtime;
  HostArena arena(runtime, 1 << 20);
  (void)plan(arena, {512, 512});
  (void)plan(arena, {1024, 2048});
  auto held = arena.lease(2048);
  {
    auto copied = arena.lease(512);
    copied_on(copied, runtime, 3);
  }
  arena.seal();
  arena.trim();
  EXPECT_EQ(arena.stats().pinned, 3072U) << "a lease keeps all of its slab";
  EXPECT_EQ(arena.stats().requested, 3072U);
  EXPECT_EQ(arena.stats().slabs, 1U);
  EXPECT_EQ(runtime.pinned_live, 1U);
  EXPECT_EQ(runtime.count(Kind::synchronize), 1U) << "the copy was waited for";
  EXPECT_FALSE(arena.lease(1025));
  EXPECT_TRUE(arena.lease(1024));
  held.reset();
  arena.trim();
  EXPECT_EQ(arena.stats().pinned, 0U);
  EXPECT_EQ(arena.stats().requested, 0U);
  EXPECT_EQ(runtime.pinned_live, 0U);
  EXPECT_FALSE(arena.lease(1));
  const std::size_t sizes[] = {512, 512};
  for (int time = 0; time < 8; ++time) {
    arena.prepare(sizes);
    EXPECT_EQ(arena.stats().pinned, 1024U);
    EXPECT_EQ(arena.available(), std::size_t{1} << 20);
    arena.trim();
  }
}

TEST(HostArena, AnotherPlanUnderTheCapTakesTheRoomOfSlotsThatAreFree) {
  FakeRuntime runtime;
  HostArena arena(runtime, 4096);
  const std::size_t small[] = {512, 512, 512, 512};
  arena.prepare(small);
  const std::size_t large[] = {2048, 1024};
  arena.prepare(large);
  EXPECT_TRUE(arena.lease(2048)) << "2048 bytes of free small slots stood in its way";
  EXPECT_EQ(arena.stats().pinned, 3072U);
  const auto held = arena.lease(1024);
  arena.prepare(small);
  EXPECT_EQ(arena.stats().pinned, 3072U) << "the large slot is cut into four, beside what is leased";
}

TEST(HostArena, AnotherPlanCutsWhatIsPinnedAnew) {
  FakeRuntime runtime;
  HostArena arena(runtime, 1 << 20);
  const std::size_t first[] = {512, 1024, 2048, 4096};
  arena.prepare(first);
  const std::size_t pinned = arena.stats().pinned;
  {
    auto copied = arena.lease(4096);
    copied_on(copied, runtime, 3);
  }
  const std::size_t second[] = {3072, 3072, 1000};
  arena.prepare(second);
  EXPECT_EQ(runtime.pinned_sizes.size(), 1U) << "nothing is pinned twice";
  EXPECT_EQ(runtime.count(Kind::synchronize), 1U) << "the copy was waited for";
  EXPECT_EQ(arena.stats().pinned, pinned);
  EXPECT_EQ(arena.stats().requested, 7144U);
  std::vector<HostArena::Lease> held;
  for (const std::size_t bytes : second) {
    EXPECT_TRUE(held.emplace_back(arena.lease(bytes)));
  }
  EXPECT_FALSE(arena.lease(1));
  held.clear();
  const std::size_t more[] = {3072, 3072, 1000, 2000};
  arena.prepare(more);
  EXPECT_EQ(arena.stats().pinned, pinned + 2000) << "only what is missing is pinned";
  const std::size_t few[] = {1500};
  arena.prepare(few);
  EXPECT_TRUE(arena.lease(1500));
  arena.trim();
  EXPECT_EQ(runtime.pinned_live, 0U);
}

TEST(HostArena, APlanThatNeedsLessGivesSlabsBack) {
  FakeRuntime runtime;
  HostArena arena(runtime, 1 << 20);
  const std::size_t first[] = {4096};
  arena.prepare(first);
  const std::size_t second[] = {4096, 8192};
  arena.prepare(second);
  EXPECT_EQ(arena.stats().slabs, 2U);
  const std::size_t third[] = {1024, 1024, 1024, 512, 512};
  arena.prepare(third);
  EXPECT_EQ(arena.stats().slabs, 1U);
  EXPECT_EQ(arena.stats().pinned, 4096U);
}

TEST(HostArena, APlanGivesBackWhatItHasNoUseForWhereItIsTheLast) {
  FakeRuntime runtime;
  HostArena arena(runtime, 1 << 20);
  {
    const auto a = arena.lease(1000), b = arena.lease(2000), c = arena.lease(3000);
    EXPECT_EQ(arena.stats().pinned, 6000U);
  }
  const std::size_t sizes[] = {3000, 1000};
  arena.prepare(sizes);
  EXPECT_EQ(arena.stats().pinned, 6000U) << "another plan follows";
  const auto held = arena.lease(2000);
  arena.prepare(sizes, HostArena::Surplus::given_back);
  EXPECT_EQ(arena.stats().pinned, 6000U) << "a lease is in it";
  arena.open();
  const std::size_t one[] = {1000};
  arena.prepare(one, HostArena::Surplus::given_back);
  EXPECT_EQ(arena.stats().pinned, 3000U);
  EXPECT_EQ(runtime.pinned_sizes.size(), 3U) << "nothing was pinned twice";
  EXPECT_THROW(plan(arena, {1}), UsageError) << "it is sealed";
}

TEST(HostArena, ASlabIsCutWhereTheLeastIsLeftOver) {
  FakeRuntime runtime;
  HostArena arena(runtime, 1 << 20);
  { const auto a = arena.lease(4096), b = arena.lease(1536); }
  const std::size_t sizes[] = {512, 512, 300};
  arena.prepare(sizes);
  EXPECT_EQ(arena.stats().pinned, 1536U);
}

TEST(HostArena, OpenedAgainItPinsForLeases) {
  FakeRuntime runtime;
  HostArena arena(runtime, 1 << 20);
  arena.seal();
  EXPECT_FALSE(arena.lease(512));
  arena.open();
  EXPECT_TRUE(arena.lease(512));
  EXPECT_EQ(arena.stats().allocations_after_seal, 0U);
}

TEST(HostArena, GrowsBeforeSealOnly) {
  FakeRuntime runtime;
  HostArena arena(runtime, 1 << 20);
  { EXPECT_TRUE(arena.lease(4096)); }
  arena.seal();
  auto held = arena.lease(4096);
  EXPECT_TRUE(held);
  EXPECT_FALSE(arena.lease(4096));
  EXPECT_EQ(runtime.pinned_sizes.size(), 1U);
  EXPECT_EQ(arena.stats().allocations_after_seal, 0U);
  EXPECT_THROW(plan(arena, {1}), UsageError);
}

TEST(HostArena, ServesTheSmallestFittingSlotLongestBack) {
  FakeRuntime runtime;
  HostArena arena(runtime, 1 << 20);
  plan(arena, {4096, 1024, 1024});
  arena.seal();
  auto first = arena.lease(1024), second = arena.lease(1000);
  std::byte* const first_data = first.data();
  std::byte* const second_data = second.data();
  EXPECT_NE(first_data, second_data);
  EXPECT_EQ(second.bytes(), 1000U);
  second.reset();
  first.reset();
  EXPECT_EQ(arena.lease(1024).data(), second_data);
  auto a = arena.lease(600), b = arena.lease(600), c = arena.lease(600);
  EXPECT_TRUE(a && b && c);
  EXPECT_FALSE(arena.lease(600));
  EXPECT_EQ(arena.stats().live_leases, 3U);
}

TEST(HostArena, NextLesseeWaitsForTheLastCopy) {
  FakeRuntime runtime;
  HostArena arena(runtime, 1 << 20);
  plan(arena, {1024});
  arena.seal();
  auto lease = arena.lease(1024);
  lease.wait_before_use(FakeRuntime::stream(1));
  EXPECT_TRUE(runtime.calls.empty()) << "a new slot has no copy to wait for";

  const auto event = std::make_shared<const Event>(runtime.create_event(EventTiming::off));
  lease.record_last_use(event);
  lease.reset();
  lease = arena.lease(1024);
  lease.wait_before_use(FakeRuntime::stream(2));
  ASSERT_EQ(runtime.calls.size(), 1U);
  EXPECT_EQ(runtime.calls[0].kind, Kind::wait);
  EXPECT_EQ(runtime.calls[0].event, event->native());
  EXPECT_EQ(runtime.calls[0].stream, 2);

  copied_on(lease, runtime, 3);
  lease.reset();
  lease = arena.lease(1024);
  lease.wait_before_use(FakeRuntime::stream(4));
  ASSERT_EQ(runtime.calls.size(), 3U);
  EXPECT_EQ(runtime.calls[1].kind, Kind::record);
  EXPECT_EQ(runtime.calls[1].stream, 3);
  EXPECT_EQ(runtime.calls[2].event, runtime.calls[1].event) << "the later copy's event replaced the earlier one";

  lease.record_last_use(event);
  lease.wait_before_use(FakeRuntime::stream(5));
  ASSERT_EQ(runtime.calls.size(), 4U) << "only the last copy counts";
  EXPECT_EQ(runtime.calls[3].event, event->native());
}

TEST(HostArena, UntouchedLeaseKeepsTheEarlierCopyToWaitFor) {
  FakeRuntime runtime;
  HostArena arena(runtime, 4096);
  const auto event = std::make_shared<const Event>(runtime.create_event(EventTiming::off));
  arena.lease(4096).record_last_use(event);
  arena.lease(4096).reset();
  arena.lease(4096).wait_before_use(FakeRuntime::stream(1));
  ASSERT_EQ(runtime.calls.size(), 1U);
  EXPECT_EQ(runtime.calls[0].event, event->native());
}

TEST(HostArena, LeaseOutlivesTheArena) {
  FakeRuntime runtime;
  HostArena::Lease lease;
  {
    HostArena arena(runtime, 1 << 16);
    lease = arena.lease(100);
    copied_on(lease, runtime, 1);
  }
  EXPECT_EQ(runtime.pinned_live, 1U);
  std::memset(lease.data(), 7, lease.bytes());
  lease.reset();
  EXPECT_EQ(runtime.pinned_live, 0U);
  EXPECT_EQ(runtime.count(Kind::synchronize), 1U) << "the memory went while its last copy could still run";
}

TEST(HostArena, EndsInsideACaptureWithoutWaiting) {
  FakeRuntime runtime;
  {
    HostArena arena(runtime, 1 << 16);
    auto lease = arena.lease(100);
    copied_on(lease, runtime, 1);
    runtime.capturing = true;
  }
  EXPECT_EQ(runtime.count(Kind::synchronize), 0U);
  EXPECT_EQ(runtime.pinned_live, 0U);
}

TEST(HostArena, FailedPinningLeavesItUsable) {
  FakeRuntime runtime;
  runtime.pin_limit = 1000;
  HostArena arena(runtime, 1 << 20);
  EXPECT_THROW(plan(arena, {2000}), DeviceError);
  EXPECT_THROW((void)arena.lease(2000), DeviceError);
  EXPECT_EQ(arena.stats().pinned, 0U);
  EXPECT_EQ(arena.stats().live_leases, 0U);
  EXPECT_TRUE(arena.lease(500));
}

TEST(HostArena, FailedPreparationLeavesItSealed) {
  FakeRuntime runtime;
  runtime.pin_limit = 1000;
  HostArena arena(runtime, 1 << 20);
  arena.prepare(std::vector<std::size_t>{500});
  EXPECT_THROW(arena.prepare(std::vector<std::size_t>{500, 2000}), DeviceError);
  const auto lease = arena.lease(500);
  EXPECT_TRUE(lease);
  EXPECT_FALSE(arena.lease(500)) << "it would be pinned in the middle of a step";
  EXPECT_EQ(arena.stats().slabs, 1U);
}

TEST(HostArena, EmptyLeaseForNoBytes) {
  FakeRuntime runtime;
  HostArena arena(runtime, 1 << 20);
  EXPECT_EQ(plan(arena, {0}), (std::vector<bool>{true}));
  EXPECT_FALSE(arena.lease(0));
  EXPECT_TRUE(runtime.pinned_sizes.empty());
}

TEST(HostArena, ThreadsNeverShareASlot) {
  FakeRuntime runtime;
  HostArena arena(runtime, 1 << 20);
  plan(arena, std::vector<std::size_t>(4, 4096));
  arena.seal();
  std::atomic<bool> clashed = false;
  const auto work = [&](unsigned char mark) {
    for (int i = 0; i < 2000; ++i) {
      const auto lease = arena.lease(4096);
      std::memset(lease.data(), mark, lease.bytes());
      for (std::size_t at = 0; at < lease.bytes(); at += 64) {
        clashed = clashed.load() || lease.data()[at] != std::byte{mark};
      }
    }
  };
  std::thread other(work, static_cast<unsigned char>(1));
  work(2);
  other.join();
  EXPECT_FALSE(clashed);
  EXPECT_EQ(arena.stats().live_leases, 0U);
  EXPECT_EQ(arena.stats().leased, 0U);
}

}  // namespace
}  // namespace sidestream
