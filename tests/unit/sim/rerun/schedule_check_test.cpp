// The search over schedules: what it says of work whose order is complete, and of work that lacks a wait.
#include <sidestream/testing/schedule_check.h>

#include <ATen/ops/add.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <sidestream/error.h>

#include "base/site.h"
#include "unit/sim/device/fixture.h"

namespace sidestream::sim {
namespace {

class ScheduleCheckTest : public SimTest {
 protected:
  void SetUp() override {
    SimTest::SetUp();
    pinned_ = runtime().allocate_pinned(4096);
    x_ = at::full({1024}, 1.5, options());
  }
  void TearDown() override {
    x_.reset();
    pinned_ = {};
    SimTest::TearDown();
  }

  /// y leaves the device on one stream and comes back on another. `waits`: the copy out waits for what makes y.
  at::Tensor round_trip(bool waits) {
    const at::Tensor y = at::mul(x_, 2);
    const at::Tensor other = at::add(x_, 1);
    if (waits) {
      order(main(), copies());
    }
    {
      const Site site(Activity::offload, attention_);
      to_host(pinned_, y, copies());
    }
    order(copies(), side());
    at::Tensor back = at::mul(other, 0);
    order(main(), side());
    {
      const Site site(Activity::reload, attention_);
      to_device(back, pinned_, side());
    }
    order(side(), main());
    order(copies(), main());
    return at::add(back, other);
  }

  const SiteName attention_{"attention"};
  PinnedMemory pinned_;
  at::Tensor x_;
};

TEST_F(ScheduleCheckTest, CompleteOrderGivesTheSameBytesInEveryOne) {
  ScheduleCheck check(runtime().device());
  const at::Tensor result = round_trip(true);
  check.stop({{"result", result}});
  EXPECT_GT(check.works(), 10);
  EXPECT_EQ(check.streams(), 3);
  EXPECT_EQ(check.result_bytes(), 4096);
  EXPECT_EQ(check.findings(), std::vector<std::string>());
  const ScheduleSearch found = check.search(300);
  EXPECT_EQ(found.tried(), 300);
  EXPECT_EQ(found.named, 4);
  EXPECT_EQ(found.starved, 3);
  EXPECT_GT(found.held, 4);
  EXPECT_GT(found.seeds, 100);
  EXPECT_GT(found.orders, 5);
  EXPECT_LE(found.orders, found.tried());
  EXPECT_EQ(found.diverged, 0);
  EXPECT_TRUE(found.divergences.empty());
}

TEST_F(ScheduleCheckTest, AMissingWaitIsShrunkToItsPair) {
  ScheduleCheck check(runtime().device());
  const at::Tensor result = round_trip(false);
  check.stop({{"result", result}});
  ASSERT_EQ(check.findings().size(), 1U);
  const ScheduleSearch found = check.search(300);
  EXPECT_GT(found.diverged, 0);
  ASSERT_EQ(found.divergences.size(), 1U) << "one pair, however many schedules show it";
  const Divergence& divergence = found.divergences.front();
  EXPECT_GT(divergence.bytes, 0);
  EXPECT_LE(divergence.bytes, 4096);
  EXPECT_EQ(divergence.result, "result");
  EXPECT_EQ(divergence.pair, check.findings().front());
  EXPECT_NE(divergence.pair.find("aten::mul"), std::string::npos) << divergence.pair;
  EXPECT_NE(divergence.pair.find("copy_to_host"), std::string::npos) << divergence.pair;
  EXPECT_NE(divergence.pair.find("offload of attention"), std::string::npos) << divergence.pair;
}

TEST_F(ScheduleCheckTest, ARecordingUnderAnyScheduleComputesTheSame) {
  for (const char* schedule : {"early", "late", "seed:3"}) {
    runtime().synchronize_device();
    Device::get().set_schedule(Schedule::parse(schedule));
    ScheduleCheck check(runtime().device());
    // Softmax of a transposed matrix frees a copy of it before it writes its result.
    const at::Tensor result = at::log_softmax(x_.view({32, 32}).t(), 0) + at::gelu(x_.view({32, 32}));
    check.stop({{"result", result}});
    Device::get().set_schedule(Schedule());
    EXPECT_TRUE(
        at::equal(result.cpu(), at::log_softmax(x_.cpu().view({32, 32}).t(), 0) + at::gelu(x_.cpu().view({32, 32}))))
        << schedule;
    EXPECT_EQ(check.findings(), std::vector<std::string>()) << schedule;
    EXPECT_EQ(check.search(20).diverged, 0) << schedule;
  }
}

TEST_F(ScheduleCheckTest, ADivergenceRunsAgainFromItsName) {
  ScheduleCheck check(runtime().device());
  const at::Tensor result = round_trip(false);
  check.stop({{"result", result}});
  const ScheduleSearch found = check.search(300);
  ASSERT_FALSE(found.divergences.empty());
  const Divergence& first = found.divergences.front();
  const auto again = check.run(Schedule::parse(first.schedule.name()));
  ASSERT_TRUE(again.has_value());
  EXPECT_EQ(again->bytes, first.bytes);
  EXPECT_EQ(again->pair, first.pair);
  EXPECT_FALSE(check.run(Schedule(Schedule::Kind::hold, 1'000'000)).has_value())
      << "nothing is held: the order of issue";
}

TEST_F(ScheduleCheckTest, AStarvedStreamShowsAWaitForItThatIsMissing) {
  ScheduleCheck check(runtime().device());
  const at::Tensor result = [&] {
    const at::Tensor y = at::mul(x_, 2);
    order(main(), copies());
    to_host(pinned_, y, copies());
    order(main(), side());
    at::Tensor back = at::mul(x_, 0);
    order(main(), side());
    to_device(back, pinned_, side());  // without waiting for the copy out
    order(side(), main());
    order(copies(), main());
    return at::add(back, 1);
  }();
  check.stop({{"result", result}});
  int shown = 0;
  for (std::uint64_t stream = 0; stream < static_cast<std::uint64_t>(check.streams()); ++stream) {
    shown += check.run(Schedule(Schedule::Kind::starve, stream)) ? 1 : 0;
  }
  EXPECT_EQ(shown, 1) << "the stream of the copy out, and no other";
}

TEST_F(ScheduleCheckTest, MemoryIsBackAfterwards) {
  at::Tensor result;
  std::vector<std::byte> recorded;
  {
    ScheduleCheck check(runtime().device());
    result = round_trip(false);
    runtime().synchronize_device();
    recorded = bytes(result);
    check.stop({{"result", result}});
    EXPECT_GT(check.search(50).diverged, 0);
  }
  EXPECT_EQ(bytes(result), recorded);
}

TEST_F(ScheduleCheckTest, ASearchEndsWhenItIsTold) {
  ScheduleCheck check(runtime().device());
  const at::Tensor result = round_trip(true);
  check.stop({{"result", result}});
  const ScheduleSearch found = check.search(1000, [](std::int64_t tried) { return tried < 42; });
  EXPECT_EQ(found.tried(), 42);
}

TEST_F(ScheduleCheckTest, BadUsesAreRefused) {
  EXPECT_THROW(ScheduleCheck(c10::Device(c10::kCPU)), UsageError);
  ScheduleCheck check(runtime().device());
  EXPECT_THROW(ScheduleCheck(runtime().device()), UsageError) << "one recording at a time";
  EXPECT_THROW((void)check.search(10), UsageError) << "the recording still runs";
  const at::Tensor result = round_trip(true);
  EXPECT_THROW(check.stop({{"result", result.slice(0, 0, 1024, 2)}}), UsageError);
  EXPECT_THROW(check.stop({{"result", at::Tensor()}}), UsageError);
  check.stop({{"result", result}});
  EXPECT_THROW((void)check.search(0), UsageError);
  EXPECT_THROW((void)check.search(-1), UsageError);
}

TEST_F(ScheduleCheckTest, WorkThatHostCodeHasAPartInIsRefused) {
  ScheduleCheck check(runtime().device());
  at::Tensor result = at::mul(x_, 2);
  runtime().synchronize_device();
  *static_cast<float*>(result.mutable_data_ptr()) = 9;
  EXPECT_THROW(check.stop({{"result", result}}), Error);
}

}  // namespace
}  // namespace sidestream::sim
