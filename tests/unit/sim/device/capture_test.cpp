#include <cstddef>
#include <cstdint>
#include <limits>
#include <thread>

#include <ATen/TensorOperators.h>
#include <ATen/ops/add.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/rand.h>
#include <sidestream/error.h>

#include "sim/device/graph.h"
#include "sim/torch/generator.h"
#include "unit/sim/device/fixture.h"

namespace sidestream::sim {
namespace {

class SimCaptureTest : public SimTest {
 protected:
  template <typename Body>
  Graph capture(const MemoryPool& pool, Body&& body, c10::ArrayRef<at::Generator> generators = {}) {
    const StreamGuard guard(runtime(), side());
    runtime().begin_capture(side(), pool, generators);
    body();
    return runtime().end_capture(side());
  }
  void launch_and_run_the_second_first(const Graph& one, const Graph& two) {
    device().set_schedule(Schedule(Schedule::Kind::late));
    runtime().launch(one, side());
    runtime().launch(two, copies());
    runtime().synchronize(copies());
    runtime().synchronize(side());
  }
};

TEST_F(SimCaptureTest, WhatWasComputedIsPoisonUntilTheFirstLaunch) {
  const auto x = at::full({1024}, 3, options());
  const auto pool = runtime().create_pool();
  at::Tensor y;
  const auto graph = capture(pool, [&] { y = at::mul(x, 2); });
  EXPECT_NE(first(y), first(y)) << "poison is not a number";
  runtime().launch(graph, side());
  EXPECT_EQ(first(y), 6);
}

TEST_F(SimCaptureTest, AGraphTakesMemoryOfTheDeviceForEachNodeWhileItLives) {
  const auto x = at::full({1024}, 3, options());
  const auto pool = runtime().create_pool();
  const std::int64_t before = runtime().room().outside;
  at::Tensor y;
  auto graph = capture(pool, [&] { y = at::mul(at::mul(x, 2), 2); });
  const auto bytes = static_cast<std::int64_t>(runtime().nodes(graph).size() * graph_node_bytes);
  EXPECT_GE(bytes, std::int64_t{2 * graph_node_bytes});
  EXPECT_EQ(runtime().room().outside - before, bytes);
  graph.reset();
  EXPECT_EQ(runtime().room().outside, before);
}

TEST_F(SimCaptureTest, AGraphForWhichThereIsNoRoomIsRefusedAndLeavesNothing) {
  const auto x = at::full({1024}, 3, options());
  const auto pool = runtime().create_pool();
  at::Tensor y;
  {
    const auto graph = capture(pool, [&] { y = at::mul(x, 2); });
  }  // the pool has its memory
  runtime().release_cached_memory();
  const std::int64_t refusals = runtime().memory_stats().refusals;
  const DeviceRoom before = runtime().room();
  device().set_memory_limit(static_cast<std::size_t>(runtime().memory_stats().reserved + before.outside) +
                            graph_node_bytes / 2);
  EXPECT_THROW((void)capture(pool, [&] { y = at::mul(x, 2); }), DeviceError);
  const MemoryRefusal refusal = runtime().latest_refusal();
  EXPECT_EQ(refusal.asked, std::int64_t{graph_node_bytes});
  EXPECT_EQ(refusal.free, std::int64_t{graph_node_bytes / 2});
  EXPECT_EQ(refusal.reserved, runtime().memory_stats().reserved);
  EXPECT_EQ(runtime().memory_stats().refusals, refusals + 1);
  device().set_memory_limit(std::numeric_limits<std::size_t>::max());
  EXPECT_EQ(runtime().room().outside, before.outside);
  EXPECT_EQ(runtime().capture_status(side()), CaptureStatus::none);
  const auto graph = capture(pool, [&] { y = at::mul(x, 2); });
  runtime().launch(graph, side());
  EXPECT_EQ(first(y), 6);
}

TEST_F(SimCaptureTest, ALaterCaptureComputesOnWhatAnEarlierOneComputed) {
  const auto pinned = runtime().allocate_pinned(512 * 8);
  const auto x = at::rand({512}, options());
  const auto pool = runtime().create_pool();
  at::Tensor index;
  at::Tensor back;
  at::Tensor sorted;
  const auto forward = capture(pool, [&] {
    index = at::argsort(x);
    to_host(pinned, index, side());
  });
  EXPECT_EQ(pinned.data()[0], std::byte{0}) << "host memory is put back";
  const auto backward = capture(pool, [&] {
    back = at::empty_like(index);
    to_device(back, pinned, side());
    sorted = at::index_select(at::index_select(x, 0, index), 0, back);  // poison would be out of range
  });
  runtime().launch(forward, side());
  runtime().launch(backward, side());
  const auto expected = at::index_select(at::index_select(x, 0, index), 0, index);
  EXPECT_EQ(bytes(sorted), bytes(expected));
}

TEST_F(SimCaptureTest, ALaterCaptureComputesOnWhatAnEarlierOneComputedInAPoolWithResultsToo) {
  const auto x = at::rand({512}, options());
  const auto pool = runtime().create_pool();
  at::Tensor result;
  const auto graph = capture(pool, [&] { result = at::mul(x, 2); });
  runtime().launch(graph, side());
  const auto computed = bytes(result);
  at::Tensor index;
  at::Tensor sorted;
  const auto forward = capture(pool, [&] { index = at::argsort(x); });
  const auto backward = capture(pool, [&] { sorted = at::index_select(x, 0, index); });  // poison would be out of range
  EXPECT_EQ(bytes(result), computed) << "what the pool held is put back";
  runtime().launch(forward, side());
  runtime().launch(backward, side());
  EXPECT_EQ(bytes(sorted), bytes(at::index_select(x, 0, index)));
}

TEST_F(SimCaptureTest, PinnedMemoryThatACaptureWroteMayBeFreedBeforeTheNext) {
  const auto x = at::rand({512}, options());
  const auto pool = runtime().create_pool();
  {
    const auto pinned = runtime().allocate_pinned(4096);
    const auto forward = capture(pool, [&] { to_host(pinned, at::mul(x, 2), side()); });
  }
  at::Tensor y;
  const auto graph = capture(pool, [&] { y = at::mul(x, 3); });
  runtime().launch(graph, side());
  EXPECT_EQ(bytes(y), bytes(at::mul(x, 3)));
}

TEST_F(SimCaptureTest, WhatACopyBesideTheGraphWouldBringIsZeroInTheCapture) {
  const auto x = at::rand({512}, options());
  const auto pool = runtime().create_pool();
  at::Tensor picked;
  const auto graph = capture(pool, [&] {
    auto other = at::full({1024}, -3, options());
    const void* const memory = other.const_data_ptr();
    other.reset();
    const auto index = at::empty({512}, options().dtype(at::kLong));
    EXPECT_EQ(index.const_data_ptr(), memory);
    picked = at::index_select(x, 0, index);  // what lay there before would be out of range
  });
  EXPECT_EQ(picked.numel(), 512);
}

TEST_F(SimCaptureTest, ALateCaptureLeavesResultsOfItsPoolAlone) {
  const auto x = at::full({1024}, 3, options());
  const auto pool = runtime().create_pool();
  at::Tensor y;
  at::Tensor z;
  const auto one = capture(pool, [&] { y = at::mul(x, 2); });
  runtime().launch(one, side());
  const auto two = capture(pool, [&] {
    y.add_(1);
    z = at::add(y, 1);
  });
  EXPECT_EQ(first(y), 6);
  runtime().launch(two, side());
  EXPECT_EQ(first(y), 7);
  EXPECT_EQ(first(z), 8);
}

TEST_F(SimCaptureTest, WorkOnTheDefaultStreamInvalidates) {
  const auto x = at::full({1024}, 3, options());
  const auto pool = runtime().create_pool();
  const StreamGuard guard(runtime(), side());
  runtime().begin_capture(side(), pool);
  {
    const StreamGuard legacy(runtime(), c10::Stream(c10::Stream::DEFAULT, runtime().device()));
    EXPECT_THROW((void)at::add(x, 1), CaptureError);
  }
  EXPECT_EQ(runtime().capture_status(side()), CaptureStatus::invalidated);
  EXPECT_THROW((void)at::add(x, 1), CaptureError) << "until it is ended, nothing can be captured";
  EXPECT_THROW((void)runtime().end_capture(side()), CaptureError);
  EXPECT_NO_THROW((void)at::add(x, 1));
}

TEST_F(SimCaptureTest, TheDefaultStreamCannotJoin) {
  const auto pool = runtime().create_pool();
  const auto event = runtime().create_event();
  runtime().begin_capture(side(), pool);
  runtime().record(event, side());
  const c10::Stream legacy(c10::Stream::DEFAULT, runtime().device());
  EXPECT_THROW(runtime().wait(legacy, event), CaptureError);
  EXPECT_EQ(runtime().capture_status(legacy), CaptureStatus::none);
  EXPECT_THROW((void)runtime().end_capture(side()), CaptureError);
}

TEST_F(SimCaptureTest, AnErrorSaysWhatInvalidatedTheCapture) {
  const auto pool = runtime().create_pool();
  runtime().begin_capture(side(), pool);
  EXPECT_THROW(runtime().synchronize(side()), CaptureError);
  try {
    (void)runtime().end_capture(side());
    FAIL();
  } catch (const CaptureError& error) {
    EXPECT_NE(std::string(error.what()).find("synchronize on a capturing stream"), std::string::npos) << error.what();
  }
}

TEST_F(SimCaptureTest, FreedMemoryIsReusedByLaterCapturesAndPoisonedInTheGraph) {
  const auto x = at::full({1024}, 3, options());
  const auto pool = runtime().create_pool();
  const void* freed = nullptr;
  at::Tensor y;
  at::Tensor z;
  const auto one = capture(pool, [&] {
    auto between = at::mul(x, 2);
    freed = between.const_data_ptr();
    y = at::add(between, 1);
    between.reset();
  });
  const auto two = capture(pool, [&] { z = at::add(y, 1); });
  EXPECT_EQ(z.const_data_ptr(), freed);
  EXPECT_EQ(runtime().nodes(one).size(), 2U) << "a poison is no node of a graph";
  runtime().launch(one, side());
  runtime().launch(two, side());
  EXPECT_EQ(first(z), 8);
}

// As autograd's threads do, which let go of what they have handed over when they come to it.
TEST_F(SimCaptureTest, WhatAThreadThatDoesNotCaptureFreesIsNotPoisonedInTheGraph) {
  const auto x = at::full({1024}, 3, options());
  const auto pool = runtime().create_pool();
  at::Tensor handed_over;
  const auto one = capture(pool, [&] { handed_over = at::mul(x, x); });
  const void* const freed = handed_over.const_data_ptr();
  at::Tensor target;
  at::Tensor y;
  const auto two = capture(pool, [&] {
    std::thread([&] { handed_over.reset(); }).join();
    target = at::empty({1024}, options());
    y = at::add(target, 1);
  });
  EXPECT_EQ(target.const_data_ptr(), freed);
  device().set_schedule(Schedule(Schedule::Kind::late));
  runtime().launch(one, main());
  target.fill_(7);
  runtime().launch(two, main());
  const auto z = at::add(y, 1);
  EXPECT_EQ(first(z), 9);
}

TEST_F(SimCaptureTest, CapturingDoesNotDraw) {
  const auto pool = runtime().create_pool();
  const GeneratorState before = default_state();
  at::Tensor y;
  const auto graph = capture(pool, [&] { y = at::rand({64}, options()); });
  EXPECT_EQ(draws_between(before, default_state()), 0U);
  const auto expected = at::rand({64}, options());
  set_default_state(before);
  runtime().launch(graph, side());
  EXPECT_EQ(bytes(y), bytes(expected));
}

TEST_F(SimCaptureTest, DrawsFollowTheOrderOfLaunchesWhateverTheScheduleDoes) {
  const auto pool = runtime().create_pool();
  const auto other_pool = runtime().create_pool();
  at::Tensor a;
  at::Tensor b;
  const auto one = capture(pool, [&] { a = at::rand({64}, options()); });
  const auto two = capture(other_pool, [&] { b = at::rand({64}, options()); });
  const GeneratorState before = default_state();
  runtime().launch(one, side());
  runtime().launch(two, copies());
  const auto expected_a = bytes(a);
  const auto expected_b = bytes(b);
  EXPECT_NE(expected_a, expected_b);
  set_default_state(before);
  launch_and_run_the_second_first(one, two);
  EXPECT_EQ(bytes(a), expected_a);
  EXPECT_EQ(bytes(b), expected_b);
}

TEST_F(SimCaptureTest, DrawsFromEachGeneratorFollowTheOrderOfLaunchesToo) {
  const at::Generator own = make_generator();
  const auto pool = runtime().create_pool();
  const auto other_pool = runtime().create_pool();
  at::Tensor a;
  at::Tensor b;
  const auto one = capture(pool, [&] { a = at::rand({64}, own, options()); }, {own});
  const auto two = capture(other_pool, [&] { b = at::rand({64}, own, options()) + at::rand({64}, options()); }, {own});
  const GeneratorState before = state_of(own);
  const GeneratorState default_before = default_state();
  runtime().launch(one, side());
  runtime().launch(two, copies());
  const auto expected_a = bytes(a);
  const auto expected_b = bytes(b);
  EXPECT_EQ(draws_between(before, state_of(own)), 128U);
  EXPECT_EQ(draws_between(default_before, default_state()), 64U);
  set_state_of(own, before);
  set_default_state(default_before);
  launch_and_run_the_second_first(one, two);
  EXPECT_EQ(bytes(a), expected_a);
  EXPECT_EQ(bytes(b), expected_b);
}

TEST_F(SimCaptureTest, OtherStreamsDrawFromWhatNoCaptureHas) {
  const at::Generator known = make_generator();
  const at::Generator free = make_generator();
  const auto pool = runtime().create_pool();
  const StreamGuard guard(runtime(), side());
  runtime().begin_capture(side(), pool, {known});
  std::thread([&] {
    EXPECT_NO_THROW((void)at::rand({8}, free, options()));
    EXPECT_THROW((void)at::rand({8}, known, options()), UsageError);
    EXPECT_THROW((void)at::rand({8}, options()), UsageError);
  }).join();
  runtime().abandon_capture(side());
}

TEST_F(SimCaptureTest, ALaunchIsHeldBackUntilItsResultIsNeeded) {
  const auto x = at::full({1024}, 3, options());
  const auto pool = runtime().create_pool();
  const auto done = runtime().create_external_event();
  at::Tensor y;
  const auto graph = capture(pool, [&] {
    y = at::mul(x, 2);
    runtime().record(done, side());
  });
  device().set_schedule(Schedule(Schedule::Kind::late));
  runtime().launch(graph, side());
  EXPECT_NE(first(y), first(y));
  runtime().wait(main(), done);
  const auto z = at::add(y, 1);
  EXPECT_EQ(first(z), 7);
}

TEST_F(SimCaptureTest, LaunchOfAResetGraphIsRefused) {
  const auto x = at::full({1024}, 3, options());
  const auto pool = runtime().create_pool();
  at::Tensor y;
  auto graph = capture(pool, [&] { y = at::mul(x, 2); });
  graph.reset();
  EXPECT_THROW(runtime().launch(graph, side()), UsageError);
  EXPECT_THROW((void)runtime().nodes(graph), UsageError);
}

TEST_F(SimCaptureTest, APoolsMemoryOutlivesItsHandleWhileAGraphUsesIt) {
  const auto x = at::full({1024}, 3, options());
  runtime().release_cached_memory();
  const auto reserved = runtime().memory_stats().reserved;
  auto pool = runtime().create_pool();
  at::Tensor y;
  auto graph = capture(pool, [&] { y = at::mul(x, 2); });
  pool.reset();
  y.reset();
  runtime().release_cached_memory();
  EXPECT_GT(runtime().memory_stats().reserved, reserved);
  EXPECT_NO_THROW(runtime().launch(graph, side()));
  graph.reset();
  runtime().release_cached_memory();
  EXPECT_EQ(runtime().memory_stats().reserved, reserved);
}

}  // namespace
}  // namespace sidestream::sim
