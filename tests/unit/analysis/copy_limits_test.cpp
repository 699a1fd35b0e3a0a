#include "analysis/copy_limits.h"

#include <cstdint>
#include <optional>
#include <vector>

#include <gtest/gtest.h>

namespace sidestream {
namespace {

using Bytes = std::vector<std::uint64_t>;

CopyWindow for_calls(const CopyLimits& limits, const Bytes& bytes, const CopyLimits::Calls& calls = {}) {
  return limits.for_calls(nested_order(bytes.size()), bytes, calls);
}

CopyWindow for_groups(const CopyLimits& limits, const Bytes& bytes) { return limits.for_groups(bytes); }

/// Of eight calls whose copies take twice as long as their forwards.
CopyLimits::Calls timed(std::optional<std::int64_t> side_streams = std::nullopt) {
  return {side_streams, std::vector<LayerPace>(8, {1, 2}), LinkPace{5, 5}};
}

TEST(CopyLimitsTest, WithoutALagIsAsDeepAsTheLargestLayers) {
  const CopyLimits none;
  EXPECT_EQ(for_calls(none, {10, 30, 20}).lag, 50);
  EXPECT_EQ(for_calls(none, {10, 30, 20}, {.side_streams = 1, .paces = {}, .link = {}}).lag, 30);
  EXPECT_EQ(for_calls(none, {10, 30, 20}, {.side_streams = 3, .paces = {}, .link = {}}).lag, 60);
  EXPECT_EQ(for_groups(none, {10, 30, 20}).lag, 50);
  EXPECT_EQ(for_groups(none, {10}).lag, 10);
  EXPECT_EQ(for_groups(none, {}).lag, 0);
}

TEST(CopyLimitsTest, AreAsGivenButHoldTheLargestLayer) {
  const CopyLimits given{45, 7, 3};
  EXPECT_EQ(for_calls(given, {10, 30, 20}, {.side_streams = 1, .paces = {}, .link = {}}), (CopyWindow{45, 7, 3}));
  EXPECT_EQ(given.for_groups({10, 30, 20}), (CopyWindow{45, 7, 3}));
  EXPECT_EQ(for_calls({5, 0}, {10, 30, 20}).lag, 30);
  EXPECT_EQ(for_groups({5, 0}, {10, 30, 20}).lag, 30);
  EXPECT_EQ(CopyLimits::smallest({10, 30, 20}), (CopyWindow{30, 0}));
}

TEST(CopyLimitsTest, ALagIsNotMoreThanWhatMayBeInFlightTakes) {
  const auto few = [](std::size_t groups) { return CopyLimits{1000, 0, groups}; };
  EXPECT_EQ(for_calls(few(0), {10, 30, 20}).lag, 30) << "the call that runs";
  EXPECT_EQ(for_calls(few(1), {10, 30, 20}).lag, 50);
  EXPECT_EQ(for_calls(few(2), {10, 30, 20}).lag, 60);
  EXPECT_EQ(for_calls(few(3), {10, 30, 20}).lag, 1000);
  EXPECT_EQ(for_groups(few(0), {10, 30, 20}).lag, 30);
  EXPECT_EQ(for_groups(few(2), {10, 30, 20}).lag, 50);
  EXPECT_EQ(few(1).for_unplanned_groups({30, 20}).lag, 30);
}

TEST(CopyLimitsTest, TimesOfCallsRaiseOnlyWhatTheOptionsLeaveOpen) {
  const Bytes bytes(8, 10);
  EXPECT_EQ(for_calls({}, bytes, timed()).lag, 40);
  EXPECT_EQ(for_calls({20, std::nullopt}, bytes, timed()).lag, 20);
  EXPECT_EQ(for_calls({}, bytes, timed(2)).lag, 20);
  EXPECT_EQ(for_calls({std::nullopt, 0}, bytes, timed()), (CopyWindow{40, 0}));
  EXPECT_EQ(for_calls({std::nullopt, 0, 1}, bytes, timed()).in_flight, 1);
  const CopyLimits::Calls slow_reloads{{}, std::vector<LayerPace>(40, {1, 1}), LinkPace{100, 9}};
  EXPECT_GT(for_calls({}, Bytes(40, 10), slow_reloads).lookahead, 0);
  EXPECT_EQ(for_calls({std::nullopt, 0}, Bytes(40, 10), slow_reloads).lookahead, 0);
  CopyLimits::Calls without_times = timed();
  without_times.paces[3] = {};
  EXPECT_EQ(for_calls({}, bytes, without_times), (CopyWindow{20, 0}));
}

TEST(CopyLimitsTest, WithoutAPlanGroupsTrailByNoMoreThanTheLargestTwo) {
  EXPECT_EQ((CopyLimits{1000, 7, 3}.for_unplanned_groups({30, 20})), (CopyWindow{50, 0, 3}));
  EXPECT_EQ((CopyLimits{40, 7}.for_unplanned_groups({30, 20})), (CopyWindow{40, 0}));
  EXPECT_EQ((CopyLimits{5, 7}.for_unplanned_groups({30, 20})), (CopyWindow{30, 0}));
  EXPECT_EQ(CopyLimits{}.for_unplanned_groups({30, 20}), (CopyWindow{50, 0}));
}

TEST(CopyLimitsTest, ANoteSaysThatALagWasRaised) {
  const CopyLimits given{5, 0};
  EXPECT_EQ(given.note({30, 0}, "the largest group"),
            "Options::lag of 5 bytes is smaller than the largest group; 30 bytes are used instead");
  EXPECT_EQ(given.note({5, 0}, "the largest group"), "");
  EXPECT_EQ(CopyLimits{}.note({30, 0}, "the largest group"), "");
}

}  // namespace
}  // namespace sidestream
