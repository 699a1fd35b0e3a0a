#include "tools/cli/window_order.h"

#include <algorithm>
#include <set>

#include <gtest/gtest.h>

namespace sidestream::cli {
namespace {

constexpr std::size_t kBytes = 1000;
constexpr std::size_t kWindow = 33;
constexpr std::size_t kStride = 32;
constexpr std::size_t kWindowsAnEpoch = (kBytes - kWindow) / kStride + 1;

TEST(WindowOrder, EveryWindowOfTheFirstEpochOnce) {
  WindowOrder order(kBytes, kWindow, kStride, 5);
  std::vector<std::size_t> offsets = order.next(kWindowsAnEpoch);
  EXPECT_EQ(order.epoch(), 1u);
  EXPECT_FALSE(std::is_sorted(offsets.begin(), offsets.end()));
  std::sort(offsets.begin(), offsets.end());
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    EXPECT_EQ(offsets[i], i * kStride);
  }
}

TEST(WindowOrder, WindowsStayInsideTheTextInLaterEpochs) {
  WindowOrder order(kBytes, kWindow, kStride, 5);
  while (order.epoch() < 20) {
    for (const std::size_t offset : order.next(7)) {
      ASSERT_LE(offset + kWindow, kBytes);
    }
  }
}

TEST(WindowOrder, LaterEpochsShiftTheirWindowBorders) {
  WindowOrder order(kBytes, kWindow, kStride, 5);
  std::set<std::size_t> shifts;
  while (order.epoch() < 10) {
    shifts.insert(order.next(1).front() % kStride);
  }
  EXPECT_GT(shifts.size(), 3u);
}

TEST(WindowOrder, SeedDecidesTheOrder) {
  WindowOrder a(kBytes, kWindow, kStride, 5);
  WindowOrder b(kBytes, kWindow, kStride, 5);
  WindowOrder c(kBytes, kWindow, kStride, 6);
  const std::vector<std::size_t> first = a.next(100);
  EXPECT_EQ(first, b.next(100));
  EXPECT_NE(first, c.next(100));
}

TEST(WindowOrder, OneWindowThatFillsTheText) {
  WindowOrder order(kWindow, kWindow, kStride, 1);
  EXPECT_EQ(order.next(3), (std::vector<std::size_t>{0, 0, 0}));
}

}  // namespace
}  // namespace sidestream::cli
