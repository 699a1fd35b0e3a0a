#include <algorithm>
#include <thread>

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <sidestream/error.h>

#include "sim/torch/cpu_allocator.h"
#include "unit/sim/device/fixture.h"

namespace sidestream::sim {
namespace {

TEST(ScheduleNameTest, EveryNameIsReadAndWritten) {
  for (const char* name :
       {"early", "late", "d2h-early", "d2h-late", "seed:0", "seed:18446744073709551615", "starve:2", "hold:0"}) {
    EXPECT_EQ(Schedule::parse(name).name(), name);
  }
}

TEST(ScheduleNameTest, ABadNameIsRefusedWithTheListOfNames) {
  for (const char* name :
       {"", "Late", "seed", "seed:", "seed:-1", "seed:1x", "seed:18446744073709551616", "starve:", "hold:x", "hold"}) {
    try {
      (void)Schedule::parse(name);
      FAIL() << name;
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find("early, late, d2h-early, d2h-late, seed:N, starve:N or hold:N"),
                std::string::npos);
    }
  }
}

class SimScheduleTest : public SimTest {
 protected:
  void SetUp() override {
    SimTest::SetUp();
    pinned_out_ = runtime().allocate_pinned(4096);
    pinned_in_ = runtime().allocate_pinned(4096);
    std::fill_n(reinterpret_cast<float*>(pinned_in_.data()), 1024, 5.0F);
    source_ = at::full({1024}, 3, options());
    target_ = at::zeros({1024}, options());
  }
  void TearDown() override {
    pinned_out_ = {};
    pinned_in_ = {};
    source_.reset();
    target_.reset();
    SimTest::TearDown();
  }

  // A copy in each direction, on streams that nothing waits for yet.
  void copy_both_ways() {
    order(main(), copies());
    order(main(), side());
    to_host(pinned_out_, source_, copies());
    to_device(target_, pinned_in_, side());
  }
  bool out_ran() { return first(pinned_out_) == 3; }
  bool in_ran() { return first(target_) == 5; }

  PinnedMemory pinned_out_;
  PinnedMemory pinned_in_;
  at::Tensor source_;
  at::Tensor target_;
};

TEST_F(SimScheduleTest, EarlyRunsEverythingAtOnce) {
  copy_both_ways();
  EXPECT_TRUE(out_ran());
  EXPECT_TRUE(in_ran());
}

TEST_F(SimScheduleTest, LateHoldsBothDirectionsBack) {
  device().set_schedule(Schedule(Schedule::Kind::late));
  copy_both_ways();
  EXPECT_FALSE(out_ran());
  EXPECT_FALSE(in_ran());
  EXPECT_FALSE(copies().query());
  EXPECT_TRUE(copies().query()) << "a loop that polls must end";
  EXPECT_TRUE(out_ran());
  runtime().synchronize_device();
  EXPECT_TRUE(in_ran());
}

// Another thread may free the memory between the begin of an operator and its allocation.
TEST_F(SimScheduleTest, AnOperatorThatAllocatesRunsAfterAllThatItsStreamWaitsFor) {
  device().set_schedule(Schedule(Schedule::Kind::late));
  order(main(), copies());
  to_host(pinned_out_, source_, copies());
  order(copies(), main());
  const void* const place = source_.const_data_ptr();
  source_.reset();
  const OperatorMemory memory(main().id(), nullptr);
  const c10::DataPtr block = operator_allocator()->allocate(4096);
  EXPECT_EQ(block.get(), place);
  EXPECT_TRUE(out_ran());
}

TEST_F(SimScheduleTest, EachDirectionCanGoFirst) {
  device().set_schedule(Schedule(Schedule::Kind::d2h_early));
  copy_both_ways();
  EXPECT_TRUE(out_ran());
  EXPECT_FALSE(in_ran());
  runtime().synchronize_device();
  std::memset(pinned_out_.data(), 0, 4096);
  target_.zero_();
  device().set_schedule(Schedule(Schedule::Kind::d2h_late));
  copy_both_ways();
  EXPECT_FALSE(out_ran());
  EXPECT_TRUE(in_ran());
}

TEST_F(SimScheduleTest, AnOperatorForcesWhatItsStreamWaitsForAndNothingElse) {
  device().set_schedule(Schedule(Schedule::Kind::late));
  copy_both_ways();
  order(side(), main());
  target_.add_(1);
  EXPECT_EQ(first(target_), 6);
  EXPECT_FALSE(out_ran());
}

TEST_F(SimScheduleTest, SeedsDifferAndRepeat) {
  const auto outcome = [&](std::uint64_t seed) {
    device().set_schedule(Schedule(Schedule::Kind::seed, seed));
    std::vector<bool> seen;
    for (int i = 0; i < 12; ++i) {
      std::memset(pinned_out_.data(), 0, 4096);
      target_.zero_();
      copy_both_ways();
      seen.push_back(out_ran());
      seen.push_back(in_ran());
      runtime().synchronize_device();
    }
    return seen;
  };
  std::vector<std::vector<bool>> outcomes;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    outcomes.push_back(outcome(seed));
    EXPECT_EQ(outcome(seed), outcomes.back());
  }
  std::sort(outcomes.begin(), outcomes.end());
  EXPECT_GT(std::unique(outcomes.begin(), outcomes.end()) - outcomes.begin(), 5);
}

TEST_F(SimScheduleTest, SeedsLetHeldBackWorkRunBesideOtherWork) {
  int later = 0;
  const auto other = at::zeros({16}, options());
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    device().set_schedule(Schedule(Schedule::Kind::seed, seed));
    std::memset(pinned_out_.data(), 0, 4096);
    order(main(), copies());
    to_host(pinned_out_, source_, copies());
    const bool at_issue = out_ran();
    for (int i = 0; i < 10; ++i) {
      other.add_(1);
    }
    later += !at_issue && out_ran() ? 1 : 0;
  }
  EXPECT_GT(later, 0);
}

TEST_F(SimScheduleTest, AWaitBindsTheVersionCurrentAtItsCall) {
  device().set_schedule(Schedule(Schedule::Kind::late));
  const auto event = runtime().create_event();
  to_host(pinned_out_, source_, copies());
  runtime().record(event, copies());
  runtime().wait(main(), event);
  to_device(target_, pinned_in_, copies());
  runtime().record(event, copies());
  source_.add_(1);
  EXPECT_TRUE(out_ran()) << "the first version stands for the copy to the host";
  EXPECT_FALSE(in_ran()) << "the second version is later than the wait";
  runtime().wait(main(), event);
  source_.add_(1);
  EXPECT_TRUE(in_ran());
}

TEST_F(SimScheduleTest, VersionZeroIsANoOpThatIsCountedAndStrictModeRefuses) {
  const auto event = runtime().create_event();
  const auto before = device().unrecorded_waits();
  runtime().wait(main(), event);
  EXPECT_EQ(device().unrecorded_waits(), before + 1);
  device().set_strict(true);
  EXPECT_THROW(runtime().wait(main(), event), UsageError);
  runtime().record(event, side());
  EXPECT_NO_THROW(runtime().wait(main(), event));
}

TEST_F(SimScheduleTest, ThreadsShareTheDevice) {
  device().set_schedule(Schedule(Schedule::Kind::seed, 4));
  const auto round_trips = [&](float value, int* wrong) {
    const auto compute = runtime().create_stream();
    const auto link = runtime().create_stream();
    const auto pinned = runtime().allocate_pinned(4096);
    const StreamGuard guard(runtime(), compute);
    for (int i = 0; i < 200; ++i) {
      auto out = at::full({1024}, value, options());
      order(compute, link);
      to_host(pinned, out, link);
      order(link, compute);
      out.zero_();
      order(compute, link);
      to_device(out, pinned, link);
      order(link, compute);
      out.add_(1);
      *wrong += first(out) == value + 1 ? 0 : 1;
    }
  };
  int wrong[2] = {0, 0};
  std::thread one(round_trips, 1.0F, &wrong[0]);
  std::thread two(round_trips, 2.0F, &wrong[1]);
  one.join();
  two.join();
  EXPECT_EQ(wrong[0], 0);
  EXPECT_EQ(wrong[1], 0);
}

TEST_F(SimScheduleTest, CopiesAcceptPinnedAndDeviceMemoryOnly) {
  std::vector<std::byte> pageable(4096);
  EXPECT_THROW(runtime().copy_to_host(pageable.data(), source_.const_data_ptr(), 4096, copies()), UsageError);
  EXPECT_THROW(runtime().copy_to_host(pinned_out_.data() + 1, source_.const_data_ptr(), 4096, copies()), UsageError);
  EXPECT_THROW(runtime().copy_to_device(pinned_out_.data(), pinned_in_.data(), 4096, copies()), UsageError);
}

TEST_F(SimScheduleTest, PinnedMemoryRunsOut) {
  device().set_pinned_limit(8192);
  EXPECT_THROW(
      {
        try {
          (void)runtime().allocate_pinned(4096);
        } catch (const DeviceError& error) {
          EXPECT_NE(std::string(error.what()).find("pinned host memory"), std::string::npos);
          throw;
        }
      },
      DeviceError);
  device().set_pinned_limit(std::numeric_limits<std::size_t>::max());
  EXPECT_NO_THROW((void)runtime().allocate_pinned(4096));
}

}  // namespace
}  // namespace sidestream::sim
