#include <functional>
#include <thread>

#include <ATen/ops/add.h>
#include <ATen/ops/sum.h>
#include <c10/core/Event.h>

#include "contract/fixture.h"
#include "sidestream/error.h"

namespace sidestream::contract {
namespace {

class CaptureErrorContract : public RuntimeContract {
 protected:
  void SetUp() override {
    RuntimeContract::SetUp();
    if (!IsSkipped() && !HasFatalFailure()) {
      input_ = filled(1);
      runtime().synchronize_device();
    }
  }

  // Runs `broken`, which breaks a rule, inside a capture. The capture must be invalid from then on, its end must fail, and
  // the same stream and pool must capture and replay correctly afterwards.
  void breaks_a_capture(const std::function<void()>& broken) {
    const auto pool = runtime().create_pool();
    {
      const StreamGuard guard(runtime(), capture());
      runtime().begin_capture(capture(), pool);
      const auto inside = at::add(input_, 1);
      broken();
      EXPECT_EQ(runtime().capture_status(capture()), CaptureStatus::invalidated);
    }
    expect_failed_end(capture());
    works_again(pool);
  }

  void works_again(const MemoryPool& pool) {
    at::Tensor output;
    Graph graph;
    {
      const StreamGuard guard(runtime(), capture());
      runtime().begin_capture(capture(), pool);
      output = at::add(input_, 2);
      graph = runtime().end_capture(capture());
    }
    runtime().launch(graph, side());
    EXPECT_TRUE(all_equal(output, 3));
    EXPECT_TRUE(all_equal(input_, 1));
  }

  void TearDown() override {
    input_.reset();
    RuntimeContract::TearDown();
  }

  at::Tensor input_;
};

TEST_P(CaptureErrorContract, SynchronizeOfTheStream) {
  breaks_a_capture([&] { EXPECT_THROW(runtime().synchronize(capture()), CaptureError); });
}

TEST_P(CaptureErrorContract, SynchronizeOfAnotherStream) {
  breaks_a_capture([&] { EXPECT_THROW(runtime().synchronize(side()), CaptureError); });
}

TEST_P(CaptureErrorContract, IdleOfAnotherStream) {
  breaks_a_capture([&] { EXPECT_ANY_THROW((void)side().query()); });
}

TEST_P(CaptureErrorContract, SynchronizeOfTheDeviceByAnotherThread) {
  breaks_a_capture([&] {
    std::thread other([&] { EXPECT_THROW(runtime().synchronize_device(), CaptureError); });
    other.join();
  });
}

TEST_P(CaptureErrorContract, SynchronizeOfTheDevice) {
  breaks_a_capture([&] { EXPECT_THROW(runtime().synchronize_device(), CaptureError); });
}

TEST_P(CaptureErrorContract, IdleOfTheStream) {
  breaks_a_capture([&] { EXPECT_ANY_THROW((void)capture().query()); });
}

TEST_P(CaptureErrorContract, QueryOfAnEvent) {
  c10::Event event(runtime().device().type());
  event.record(side());
  breaks_a_capture([&] { EXPECT_ANY_THROW((void)event.query()); });
}

TEST_P(CaptureErrorContract, SynchronizeOfAnEvent) {
  const auto event = runtime().create_event();
  runtime().record(event, side());
  breaks_a_capture([&] { EXPECT_THROW(runtime().synchronize(event), CaptureError); });
}

TEST_P(CaptureErrorContract, ReadingAValueOnTheHost) {
  breaks_a_capture([&] { EXPECT_ANY_THROW((void)input_.sum().item<float>()); });
}

TEST_P(CaptureErrorContract, WaitingForAnEventFromOutside) {
  const auto event = runtime().create_event();
  runtime().record(event, side());
  breaks_a_capture([&] { EXPECT_THROW(runtime().wait(capture(), event), CaptureError); });
}

TEST_P(CaptureErrorContract, WaitingOutsideForAnEventOfACapture) {
  const auto pool = runtime().create_pool();
  const auto event = runtime().create_event();
  c10::Event queried(runtime().device().type());
  Graph graph;
  {
    const StreamGuard guard(runtime(), capture());
    runtime().begin_capture(capture(), pool);
    const auto inside = at::add(input_, 1);
    runtime().record(event, capture());
    queried.record(capture());
    graph = runtime().end_capture(capture());
  }
  EXPECT_THROW(runtime().wait(side(), event), CaptureError);
  EXPECT_ANY_THROW((void)queried.query());
  runtime().record(event, side());
  runtime().wait(capture(), event);
  runtime().synchronize(capture());
  works_again(pool);
}

TEST_P(CaptureErrorContract, LaunchingAGraph) {
  const auto pool = runtime().create_pool();
  Graph graph;
  {
    const StreamGuard guard(runtime(), capture());
    runtime().begin_capture(capture(), pool);
    const auto inside = at::add(input_, 1);
    graph = runtime().end_capture(capture());
  }
  breaks_a_capture([&] { EXPECT_THROW(runtime().launch(graph, capture()), CaptureError); });
}

TEST_P(CaptureErrorContract, AllocatingPinnedMemory) {
  breaks_a_capture([&] { EXPECT_THROW((void)runtime().allocate_pinned(4096), CaptureError); });
}

TEST_P(CaptureErrorContract, GivingCachedMemoryBack) {
  breaks_a_capture([&] { EXPECT_THROW(runtime().release_cached_memory(), CaptureError); });
}

TEST_P(CaptureErrorContract, AForkThatIsNotJoined) {
  const auto pool = runtime().create_pool();
  {
    const auto fork = runtime().create_event();
    const auto pinned = runtime().allocate_pinned(4096);
    const StreamGuard guard(runtime(), capture());
    runtime().begin_capture(capture(), pool);
    const auto inside = at::add(input_, 1);
    runtime().record(fork, capture());
    runtime().wait(copies(), fork);
    runtime().copy_to_host(pinned.data(), inside.const_data_ptr(), 4096, copies());
    expect_failed_end(capture());
  }
  works_again(pool);
}

TEST_P(CaptureErrorContract, AForkOfAForkThatIsNotJoined) {
  const auto pool = runtime().create_pool();
  {
    const auto fork = runtime().create_event();
    const auto again = runtime().create_event();
    const auto join = runtime().create_event();
    const StreamGuard guard(runtime(), capture());
    runtime().begin_capture(capture(), pool);
    const auto inside = at::add(input_, 1);
    runtime().record(fork, capture());
    runtime().wait(copies(), fork);
    runtime().record(again, copies());
    runtime().wait(side(), again);
    {
      const StreamGuard on_side(runtime(), side());
      inside.add_(1);
    }
    runtime().record(join, copies());
    runtime().wait(capture(), join);
    expect_failed_end(capture());
  }
  works_again(pool);
}

TEST_P(CaptureErrorContract, BeginningTwice) {
  const auto pool = runtime().create_pool();
  const auto second = runtime().create_pool();
  {
    const StreamGuard guard(runtime(), capture());
    runtime().begin_capture(capture(), pool);
    EXPECT_THROW(runtime().begin_capture(capture(), second), CaptureError);
    runtime().abandon_capture(capture());
  }
  EXPECT_EQ(runtime().capture_status(capture()), CaptureStatus::none);
  works_again(pool);
}

TEST_P(CaptureErrorContract, TwoCapturesInOnePool) {
  const auto pool = runtime().create_pool();
  {
    const StreamGuard guard(runtime(), capture());
    runtime().begin_capture(capture(), pool);
    EXPECT_THROW(runtime().begin_capture(side(), pool), CaptureError);
    runtime().abandon_capture(capture());
  }
  works_again(pool);
}

TEST_P(CaptureErrorContract, BeginningOnTheDefaultStream) {
  const auto pool = runtime().create_pool();
  const c10::Stream stream(c10::Stream::DEFAULT, runtime().device());
  EXPECT_THROW(runtime().begin_capture(stream, pool), CaptureError);
  EXPECT_EQ(runtime().capture_status(stream), CaptureStatus::none);
  works_again(pool);
}

TEST_P(CaptureErrorContract, EndingWhatWasNotBegun) {
  EXPECT_THROW((void)runtime().end_capture(capture()), UsageError);
  runtime().abandon_capture(capture());
}

TEST_P(CaptureErrorContract, EndingOnAnotherThread) {
  const auto pool = runtime().create_pool();
  {
    const StreamGuard guard(runtime(), capture());
    runtime().begin_capture(capture(), pool);
    std::thread other([&] { EXPECT_THROW((void)runtime().end_capture(capture()), UsageError); });
    other.join();
    runtime().abandon_capture(capture());
  }
  works_again(pool);
}

TEST_P(CaptureErrorContract, AnInvalidCaptureCanBeAbandoned) {
  const auto pool = runtime().create_pool();
  {
    const StreamGuard guard(runtime(), capture());
    runtime().begin_capture(capture(), pool);
    EXPECT_THROW(runtime().synchronize(capture()), CaptureError);
    runtime().abandon_capture(capture());
  }
  EXPECT_EQ(runtime().capture_status(capture()), CaptureStatus::none);
  works_again(pool);
}

SIDESTREAM_ON_EVERY_BACKEND(CaptureErrorContract);

}  // namespace
}  // namespace sidestream::contract
