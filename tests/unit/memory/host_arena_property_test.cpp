// The host arena against a plain model: hundreds of thousands of random leases and returns under a cap.
#include <cstdint>
#include <iterator>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "memory/host_arena.h"
#include "runtime/runtime.h"

namespace sidestream {
namespace {

constexpr int kOperations = 200'000;
constexpr std::size_t kCap = std::size_t{1} << 20;

class HostArenaProperty : public testing::TestWithParam<std::uint64_t> {};

TEST_P(HostArenaProperty, LeasesNeverOverlapAndNothingIsLost) {
  std::mt19937_64 random(GetParam());
  const auto runtime = make_runtime(c10::Device(c10::DeviceType::PrivateUse1, 0));
  HostArena arena(*runtime, kCap);
  std::vector<std::size_t> sizes;
  for (int i = 0; i < 100; ++i) {
    sizes.push_back(1 + random() % 16'000);
  }
  std::size_t slots = 0;
  for (const bool planned : arena.plan(sizes)) {
    slots += planned ? 1 : 0;
  }
  arena.seal();
  ASSERT_GT(slots, 10U);
  std::map<std::byte*, HostArena::Lease> live;
  std::size_t leased = 0;
  std::size_t refused = 0;
  for (int i = 0; i < kOperations; ++i) {
    if (live.empty() || random() % 2 == 0) {
      const std::size_t bytes = 1 + random() % 16'000;
      HostArena::Lease lease = arena.lease(bytes);
      if (lease) {
        ASSERT_EQ(lease.bytes(), bytes);
        ASSERT_EQ(reinterpret_cast<std::uintptr_t>(lease.data()) % HostArena::alignment, 0U);
        std::byte* const begin = lease.data();
        const auto [place, is_new] = live.emplace(begin, std::move(lease));
        ASSERT_TRUE(is_new);
        if (place != live.begin()) {
          const auto before = std::prev(place);
          ASSERT_LE(before->first + before->second.bytes(), begin);
        }
        if (const auto after = std::next(place); after != live.end()) {
          ASSERT_LE(begin + bytes, after->first);
        }
        leased += bytes;
      } else {
        ++refused;
      }
    } else {
      const auto chosen = std::next(live.begin(), static_cast<std::ptrdiff_t>(random() % live.size()));
      leased -= chosen->second.bytes();
      live.erase(chosen);
    }
    const HostArenaStats stats = arena.stats();
    ASSERT_EQ(stats.live_leases, live.size());
    ASSERT_EQ(stats.leased, leased);
    ASSERT_EQ(stats.refusals, refused);
    ASSERT_LE(stats.pinned, kCap);
    ASSERT_EQ(stats.allocations_after_seal, 0U);
  }
  live.clear();
  for (std::size_t i = 0; i < slots; ++i) {
    live.emplace(reinterpret_cast<std::byte*>(i), arena.lease(1));
  }
  EXPECT_EQ(arena.stats().live_leases, slots) << "every slot is there again";
}

INSTANTIATE_TEST_SUITE_P(Seeds, HostArenaProperty, testing::Values(1, 2, 3));

}  // namespace
}  // namespace sidestream
