#include "runtime/live_memory.h"

#include <algorithm>
#include <cstdint>

#include <gtest/gtest.h>

#include "unit/memory/fake_runtime.h"

namespace sidestream {
namespace {

/// An allocator that is told what tensors hold.
class CountingRuntime final : public test::FakeRuntime {
 public:
  MemoryStats memory_stats() const override {
    ++asked;
    return stats;
  }
  void reset_peak_memory_stats() override {
    stats.allocated_peak = stats.allocated;
    stats.reserved_peak = stats.reserved;
  }
  void allocate(std::int64_t bytes) {
    stats.allocated += bytes;
    stats.allocated_peak = std::max(stats.allocated_peak, stats.allocated);
  }

  MemoryStats stats;
  mutable int asked = 0;
};

class LiveMemoryTest : public testing::Test {
 protected:
  void SetUp() override { memory_.restart(runtime_); }
  void TearDown() override { memory_.change(runtime_, {runtime_.stats.allocated - memory_.use(runtime_).live, 0}); }

  CountingRuntime runtime_;
  LiveMemory& memory_ = LiveMemory::of(runtime_.device());
};

TEST_F(LiveMemoryTest, WithoutGraphsItIsWhatIsAllocated) {
  runtime_.allocate(100);
  runtime_.allocate(-60);
  const LiveMemory::Use use = memory_.use(runtime_);
  EXPECT_EQ(use.live, 40);
  EXPECT_EQ(use.live_peak, 100);
  EXPECT_EQ(use.allocator.allocated_peak, 100);
}

TEST_F(LiveMemoryTest, APeakIsThatOfOneMoment) {
  LiveMemory::Measurement measurement(runtime_);
  runtime_.allocate(100);  // and nothing hidden
  runtime_.allocate(-60);
  memory_.change(runtime_, {50, 0});
  runtime_.allocate(5);
  runtime_.allocate(-5);
  EXPECT_EQ(measurement.peak().live, 100);
  runtime_.allocate(20);
  EXPECT_EQ(measurement.peak().live, 110);
  EXPECT_EQ(memory_.use(runtime_).live_peak, 110);
  EXPECT_EQ(memory_.use(runtime_).allocator.allocated_peak, 100) << "measuring does not lose it";
}

TEST_F(LiveMemoryTest, AGraphThatRunsHasAPeakOfItsOwn) {
  LiveMemory::Measurement measurement(runtime_);
  runtime_.allocate(100);
  memory_.launched(runtime_, {70, 9}, {30, 5});
  EXPECT_EQ(measurement.peak().live, 170);
  EXPECT_EQ(measurement.peak().in_flight, 9);
  EXPECT_EQ(memory_.use(runtime_).live, 130);
  memory_.launched(runtime_, {50, 0}, {-30, -5});
  EXPECT_EQ(measurement.peak().live, 180);
  EXPECT_EQ(measurement.peak().in_flight, 5);
}

TEST_F(LiveMemoryTest, TheAllocatorIsAskedOnlyWhileSomebodyMeasures) {
  const int before = runtime_.asked;
  memory_.change(runtime_, {10, 0});
  memory_.launched(runtime_, {20, 0}, {-10, 0});
  EXPECT_EQ(runtime_.asked, before);
  const LiveMemory::Measurement measurement(runtime_);
  memory_.change(runtime_, {});
  EXPECT_GT(runtime_.asked, before);
}

TEST_F(LiveMemoryTest, APeakBeforeAnUnmeasuredChangeIsNotAddedToIt) {
  runtime_.allocate(100);
  runtime_.allocate(-100);
  memory_.change(runtime_, {50, 0});
  EXPECT_EQ(memory_.use(runtime_).live_peak, 50) << "not 150";
  memory_.tell_peak(120);
  EXPECT_EQ(memory_.use(runtime_).live_peak, 120);
}

TEST_F(LiveMemoryTest, TwoMayMeasureAtATime) {
  LiveMemory::Measurement first(runtime_);
  runtime_.allocate(100);
  runtime_.allocate(-100);
  {
    LiveMemory::Measurement second(runtime_);
    runtime_.allocate(30);
    EXPECT_EQ(second.peak().live, 30);
    runtime_.allocate(-30);
  }
  memory_.change(runtime_, {});
  EXPECT_EQ(first.peak().live, 100);
}

}  // namespace
}  // namespace sidestream
