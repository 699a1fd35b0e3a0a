#include <memory>
#include <vector>

#include <gtest/gtest.h>
#include <sidestream/error.h>

#include "sim/rerun/cost.h"

namespace sidestream::sim {
namespace {

class CostTest : public testing::Test {
 protected:
  std::uint32_t add(Work::Kind kind, std::size_t bytes, std::vector<std::uint32_t> after) {
    auto work = std::make_shared<Work>();
    work->kind = kind;
    work->accesses.push_back({nullptr, bytes, true});
    RecordedWork recorded;
    recorded.work = std::move(work);
    recorded.after = std::move(after);
    works_.push_back(std::move(recorded));
    return static_cast<std::uint32_t>(works_.size() - 1);
  }
  // One second for each byte of an operator, for two bytes to the host, for four bytes to the device.
  Simulation run() {
    Cost cost;
    cost.to_host_bandwidth = 2;
    cost.to_device_bandwidth = 4;
    cost.memory_bandwidth = 1;
    return simulate(works_, cost);
  }

  std::vector<RecordedWork> works_;
};

TEST_F(CostTest, ACopyBesideComputeIsHidden) {
  const auto one = add(Work::Kind::compute, 10, {});
  add(Work::Kind::copy_to_host, 12, {one});
  add(Work::Kind::compute, 10, {one});
  const auto result = run();
  EXPECT_EQ(result.seconds, 20);
  EXPECT_EQ(result.copy_seconds, 6);
  EXPECT_EQ(result.seconds, result.compute_seconds);
  EXPECT_EQ(result.spans[1].begin, 10);
  EXPECT_EQ(result.spans[1].end, 16);
}

TEST_F(CostTest, ACopyThatComputeWaitsForIsExposed) {
  const auto one = add(Work::Kind::compute, 10, {});
  const auto in = add(Work::Kind::copy_to_device, 12, {one});
  add(Work::Kind::compute, 10, {one, in});
  EXPECT_EQ(run().seconds, 23);
  EXPECT_EQ(run().seconds - run().compute_seconds, 3);
}

TEST_F(CostTest, TheDirectionsShareNothingAndOneDirectionIsShared) {
  add(Work::Kind::copy_to_host, 8, {});
  add(Work::Kind::copy_to_device, 16, {});
  EXPECT_EQ(run().seconds, 4);
  add(Work::Kind::copy_to_host, 8, {});
  EXPECT_EQ(run().seconds, 8);
}

TEST_F(CostTest, WorkThatIsReadyFirstGoesFirst) {
  const auto slow = add(Work::Kind::copy_to_host, 20, {});
  const auto late = add(Work::Kind::compute, 1, {slow});
  const auto soon = add(Work::Kind::compute, 5, {});
  const auto result = run();
  EXPECT_EQ(result.spans[soon].begin, 0);
  EXPECT_EQ(result.spans[late].begin, 10);
}

TEST_F(CostTest, EventsAndPoisonsCostNothing) {
  const auto one = add(Work::Kind::compute, 3, {});
  const auto record = add(Work::Kind::event_record, 0, {one});
  const auto poison = add(Work::Kind::poison, 100, {record});
  add(Work::Kind::compute, 4, {poison});
  EXPECT_EQ(run().seconds, 7);
}

TEST_F(CostTest, ABandwidthOfZeroIsRefused) {
  Cost cost;
  cost.to_host_bandwidth = 0;
  EXPECT_THROW((void)simulate(works_, cost), UsageError);
}

}  // namespace
}  // namespace sidestream::sim
