#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/rand.h>
#include <c10/core/Event.h>
#include <sidestream/error.h>

#include "sim/rerun/recording.h"
#include "unit/sim/device/fixture.h"

namespace sidestream::sim {
namespace {

std::vector<Schedule> all_schedules(std::uint64_t seeds) {
  std::vector<Schedule> schedules;
  for (const auto kind :
       {Schedule::Kind::early, Schedule::Kind::late, Schedule::Kind::d2h_early, Schedule::Kind::d2h_late}) {
    schedules.emplace_back(kind);
  }
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    schedules.emplace_back(Schedule::Kind::seed, seed);
  }
  return schedules;
}

// The waits of a hand-made offload, each of which can be left out.
enum class Missing { none, copy_out_waits_compute, reuse_waits_copy_out, copy_in_waits_reuse, compute_waits_copy_in };

class RecordingTest : public SimTest {
 protected:
  void SetUp() override {
    SimTest::SetUp();
    pinned_ = runtime().allocate_pinned(4096);
  }
  void TearDown() override {
    pinned_ = {};
    SimTest::TearDown();
  }

  // y leaves the device, its memory is used again, and y comes back into other memory that was used before.
  at::Tensor offload_and_reload(const at::Tensor& x, Missing missing) {
    auto y = at::mul(x, 2);
    if (missing != Missing::copy_out_waits_compute) {
      order(main(), copies());
    }
    to_host(pinned_, y, copies());
    if (missing != Missing::reuse_waits_copy_out) {
      order(copies(), main());
    }
    y.reset();
    auto back = at::mul(x, 7);  // takes y's memory
    const auto used = at::add(back, 1);
    back.reset();
    back = at::empty({1024}, options());  // and gives it back
    if (missing != Missing::copy_in_waits_reuse) {
      order(main(), side());
    }
    order(copies(), side());
    to_device(back, pinned_, side());
    if (missing != Missing::compute_waits_copy_in) {
      order(side(), main());
    }
    return at::add(at::mul(back, 3), used);
  }

  // How many of the schedules leave other bytes than `expected` in `result`.
  int wrong(Recording& recording, const at::Tensor& result, float expected, std::uint64_t seeds) {
    int count = 0;
    for (const Schedule& schedule : all_schedules(seeds)) {
      recording.rerun(schedule);
      count += first(result) == expected ? 0 : 1;
    }
    return count;
  }

  PinnedMemory pinned_;
};

TEST_F(RecordingTest, ACorrectStepGivesTheSameBytesInEveryOrder) {
  const auto x = at::full({1024}, 3, options());
  Recording recording;
  const auto result = offload_and_reload(x, Missing::none);
  recording.stop();
  const auto expected = bytes(result);
  EXPECT_EQ(first(result), 3 * 6 + 22);
  for (const Schedule& schedule : all_schedules(100)) {
    recording.rerun(schedule);
    EXPECT_EQ(bytes(result), expected) << schedule.name();
  }
}

TEST_F(RecordingTest, EachMissingWaitShowsInSomeOrder) {
  for (const auto missing : {Missing::copy_out_waits_compute, Missing::reuse_waits_copy_out,
                             Missing::copy_in_waits_reuse, Missing::compute_waits_copy_in}) {
    const auto x = at::full({1024}, 3, options());
    Recording recording;
    const auto result = offload_and_reload(x, missing);
    recording.stop();
    EXPECT_EQ(first(result), 40) << "issued in order, the fault does not show";
    EXPECT_GT(wrong(recording, result, 40, 100), 0) << "fault " << static_cast<int>(missing);
  }
}

TEST_F(RecordingTest, MemoryThatAnotherStreamUsesIsNotOverwrittenInAnyOrder) {
  for (const bool recorded : {true, false}) {
    auto x = at::full({1024}, 3, options());
    const auto later = at::full({1024}, 5, options());
    Recording recording;
    order(main(), side());
    at::Tensor doubled;
    {
      const StreamGuard on_side(runtime(), side());
      doubled = at::mul(x, 2);
    }
    if (recorded) {
      x.record_stream(side());
    }
    x.reset();
    const auto taken = at::mul(later, 7);  // where x was, if that is free
    recording.stop();
    EXPECT_EQ(wrong(recording, doubled, 6, 20) > 0, !recorded);
  }
}

TEST_F(RecordingTest, AReloadThatDoesNotWaitForAGraphsCopyShows) {
  for (const bool waits : {true, false}) {
    const auto x = at::full({1024}, 3, options());
    const auto y = at::full({1024}, 0, options());
    const MemoryPool pool = runtime().create_pool();
    const ExternalEvent copies_done = runtime().create_external_event();
    runtime().begin_capture(side(), pool);
    to_host(pinned_, x, side());
    runtime().record(copies_done, side());
    const Graph graph = runtime().end_capture(side());
    Recording recording;
    runtime().launch(graph, side());
    if (waits) {
      runtime().wait(main(), copies_done);
    }
    to_device(y, pinned_, main());
    const auto result = at::mul(y, 2);
    recording.stop();
    EXPECT_EQ(first(result), 6);
    EXPECT_EQ(wrong(recording, result, 6, 20) > 0, !waits);
  }
}

TEST_F(RecordingTest, StepsRecordedWhileCopiesAreHeldBackRunAgainAsWell) {
  device().set_schedule(Schedule(Schedule::Kind::late));
  const auto x = at::full({1024}, 3, options());
  Recording recording;
  const auto result = offload_and_reload(x, Missing::none);
  recording.stop();
  EXPECT_EQ(wrong(recording, result, 40, 20), 0);
}

TEST_F(RecordingTest, MemoryIsPutBackAfterReruns) {
  auto x = at::full({1024}, 3, options());
  {
    Recording recording;
    x.add_(1);
    recording.stop();
    x.add_(1);
    recording.rerun(Schedule());
    EXPECT_EQ(first(x), 4);
    recording.restore();
    EXPECT_EQ(first(x), 5);
    recording.rerun(Schedule());
  }
  EXPECT_EQ(first(x), 5);
}

TEST_F(RecordingTest, MemoryThatWasNotInUseIsPoison) {
  Recording recording;
  const auto never_written = at::empty({1024}, options());
  std::memset(never_written.mutable_data_ptr(), 0, 4096);
  recording.stop();
  recording.rerun(Schedule());
  EXPECT_NE(first(never_written), first(never_written)) << "poison is not a number";
}

TEST_F(RecordingTest, FreedMemoryIsPoisonedInTheOrderOfItsStream) {
  Recording recording;
  auto y = at::full({1024}, 3, options());
  const auto* const address = static_cast<const float*>(y.const_data_ptr());
  y.reset();
  EXPECT_NE(*address, *address);
  recording.stop();
  ASSERT_FALSE(recording.works().empty());
  EXPECT_EQ(recording.works().back().work->kind, Work::Kind::poison);
  EXPECT_EQ(recording.works().back().after.size(), 1U);
}

TEST_F(RecordingTest, WhatTheHostWroteForACopyIsThereAgain) {
  const auto target = at::empty({1024}, options());
  Recording recording;
  std::fill_n(reinterpret_cast<float*>(pinned_.data()), 1024, 8.0F);
  to_device(target, pinned_, main());
  recording.stop();
  std::memset(pinned_.data(), 0, 4096);
  recording.rerun(Schedule());
  EXPECT_EQ(first(target), 8);
}

TEST_F(RecordingTest, AGraphIsRecordedNodeByNodeWithItsEdges) {
  const auto x = at::full({1024}, 3, options());
  const auto pool = runtime().create_pool();
  const auto done = runtime().create_external_event();
  at::Tensor y;
  Graph graph;
  {
    const StreamGuard guard(runtime(), side());
    runtime().begin_capture(side(), pool);
    y = at::mul(x, 2);
    runtime().record(done, side());
    order(side(), copies());
    to_host(pinned_, y, copies());
    order(copies(), side());
    graph = runtime().end_capture(side());
  }
  for (const bool missing : {false, true}) {
    x.fill_(5);
    Recording recording;
    x.add_(1);
    order(main(), side());
    runtime().launch(graph, side());
    if (!missing) {
      runtime().wait(main(), done);
    }
    const auto result = at::add(y, 1);
    order(side(), main());
    recording.stop();
    EXPECT_EQ(first(result), 13);
    EXPECT_EQ(wrong(recording, result, 13, 50) > 0, missing);
  }
  graph.reset();
}

TEST_F(RecordingTest, DrawsAreThoseOfTheRecordedStep) {
  Recording recording;
  const auto a = at::rand({64}, options());
  const auto b = at::rand({64}, options());
  recording.stop();
  const auto expected_a = bytes(a);
  const auto expected_b = bytes(b);
  for (int i = 0; i < 2; ++i) {
    recording.rerun(Schedule(Schedule::Kind::late));
    EXPECT_EQ(bytes(a), expected_a);
    EXPECT_EQ(bytes(b), expected_b);
  }
}

// A copy out on one stream, a look of the host, and a copy in on another that takes the same pinned bytes.
TEST_F(RecordingTest, WhatTheHostHasSeenIsBeforeAllThatIsIssuedLater) {
  const auto x = at::full({1024}, 3, options());
  const auto y = at::empty({1024}, options());
  order(main(), copies());
  order(main(), side());
  const std::vector<std::pair<std::string, std::function<void()>>> looks{
      {"none", [] {}},
      {"synchronize", [&] { runtime().synchronize(copies()); }},
      {"device", [&] { runtime().synchronize_device(); }},
      {"idle", [&] { EXPECT_TRUE(copies().query()); }},
      {"other", [&] { runtime().synchronize(side()); }},
  };
  for (const auto& [name, look] : looks) {
    Recording recording;
    to_host(pinned_, x, copies());
    look();
    to_device(y, pinned_, side());
    order(side(), main());
    const auto result = at::mul(y, 2);
    order(copies(), main());
    recording.stop();
    EXPECT_EQ(wrong(recording, result, 6, 20) > 0, name == "none" || name == "other") << name;
  }
}

TEST_F(RecordingTest, WhatTheHostHasSeenOfAnEventIsBeforeAllThatIsIssuedLater) {
  const auto x = at::full({1024}, 3, options());
  const auto y = at::empty({1024}, options());
  order(main(), copies());
  order(main(), side());
  for (const bool query : {false, true}) {
    Recording recording;
    c10::Event event(copies().device_type());
    to_host(pinned_, x, copies());
    event.record(copies());
    if (query) {
      EXPECT_TRUE(event.query());
    } else {
      event.synchronize();
    }
    to_device(y, pinned_, side());
    order(side(), main());
    const auto result = at::mul(y, 2);
    recording.stop();
    EXPECT_EQ(wrong(recording, result, 6, 20), 0);
  }
}

TEST_F(RecordingTest, OneAtATime) {
  Recording recording;
  EXPECT_THROW(Recording(), UsageError);
  EXPECT_THROW(recording.rerun(Schedule()), UsageError);
  recording.stop();
  EXPECT_NO_THROW(Recording());
}

}  // namespace
}  // namespace sidestream::sim
