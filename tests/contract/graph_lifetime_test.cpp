#include <thread>

#include "contract/fixture.h"
#include "sidestream/error.h"

namespace sidestream::contract {
namespace {

class LifetimeContract : public RuntimeContract {
 protected:
  Graph capture_increment(const MemoryPool& pool, const at::Tensor& tensor) {
    runtime().synchronize_device();
    return captured(pool, [&] { tensor.add_(1); });
  }
};

TEST_P(LifetimeContract, AGraphThatWasResetCannotBeLaunched) {
  const auto pool = runtime().create_pool();
  const auto tensor = filled(1);
  auto graph = capture_increment(pool, tensor);
  runtime().launch(graph, side());
  runtime().synchronize(side());
  graph.reset();
  EXPECT_FALSE(static_cast<bool>(graph));
  EXPECT_THROW(runtime().launch(graph, side()), UsageError);
  EXPECT_THROW((void)runtime().nodes(graph), UsageError);
  EXPECT_TRUE(all_equal(tensor, 2));
}

TEST_P(LifetimeContract, DestroyingHandlesDuringACaptureHarmsNeither) {
  const auto pool = runtime().create_pool();
  const auto other_pool = runtime().create_pool();
  const auto tensor = filled(1);
  auto old_graph = capture_increment(pool, tensor);
  auto old_event = runtime().create_event();
  auto old_external = runtime().create_external_event();
  auto old_pinned = runtime().allocate_pinned(4096);
  auto old_pool = runtime().create_pool();
  runtime().launch(old_graph, side());
  runtime().synchronize_device();
  Graph graph = captured(other_pool, [&] {
    tensor.add_(10);
    old_graph.reset();
    old_event.reset();
    old_external.reset();
    old_pinned = PinnedMemory();
    old_pool.reset();
    { const auto stream = runtime().create_stream(); }
    EXPECT_EQ(runtime().capture_status(capture()), CaptureStatus::active);
    tensor.add_(10);
  });
  runtime().launch(graph, side());
  EXPECT_TRUE(all_equal(tensor, 22));
}

// Each engine has a runtime of its own; what one of them destroys may be another one's capture away from safe.
TEST_P(LifetimeContract, AnotherRuntimeOfTheDeviceMayDestroyDuringACapture) {
  const auto other = make_runtime(runtime().device());
  const auto pool = other->create_pool();
  const auto tensor = filled(1);
  runtime().synchronize_device();
  Graph old_graph;
  {
    const auto stream = other->create_stream();
    const StreamGuard guard(*other, stream);
    other->begin_capture(stream, pool);
    tensor.add_(1);
    old_graph = other->end_capture(stream);
  }
  auto old_pinned = other->allocate_pinned(4096);
  const auto own_pool = runtime().create_pool();
  runtime().synchronize_device();
  const Graph graph = captured(own_pool, [&] {
    tensor.add_(10);
    old_graph.reset();
    old_pinned = PinnedMemory();
    { const auto stream = other->create_stream(); }
    EXPECT_EQ(other->capture_status(capture()), CaptureStatus::active);
    tensor.add_(10);
  });
  runtime().launch(graph, side());
  EXPECT_TRUE(all_equal(tensor, 21));
  EXPECT_EQ(other->live_handles(), 1) << "the pool";
}

TEST_P(LifetimeContract, AnotherThreadMayWorkAndDestroyDuringACapture) {
  const auto pool = runtime().create_pool();
  const auto other_pool = runtime().create_pool();
  const auto tensor = filled(1);
  auto old_graph = capture_increment(pool, tensor);
  runtime().synchronize_device();
  Graph graph = captured(other_pool, [&] {
    tensor.add_(1);
    std::thread other([&] {
      const StreamGuard current(runtime(), side());
      old_graph.reset();
      const auto pinned = runtime().allocate_pinned(4096);
      const auto event = runtime().create_event();
      const auto own = filled(3, 1 << 20);
      runtime().copy_to_host(pinned.data(), own.const_data_ptr(), 4096, side());
      runtime().record(event, side());
      runtime().synchronize(event);
      EXPECT_TRUE(side().query());
      EXPECT_EQ(reinterpret_cast<const float*>(pinned.data())[5], 3.0F);
    });
    other.join();
    EXPECT_EQ(runtime().capture_status(capture()), CaptureStatus::active);
  });
  runtime().launch(graph, side());
  EXPECT_TRUE(all_equal(tensor, 2));
}

TEST_P(LifetimeContract, AbandonLeavesNothing) {
  const auto pool = runtime().create_pool();
  const auto tensor = filled(1);
  runtime().synchronize_device();
  {
    const StreamGuard guard(runtime(), capture());
    runtime().begin_capture(capture(), pool);
    tensor.add_(1);
    runtime().abandon_capture(capture());
  }
  EXPECT_EQ(runtime().capture_status(capture()), CaptureStatus::none);
  EXPECT_TRUE(all_equal(tensor, 1));
  runtime().abandon_capture(capture());
  const auto graph = capture_increment(pool, tensor);
  runtime().launch(graph, side());
  EXPECT_TRUE(all_equal(tensor, 2));
}

TEST_P(LifetimeContract, AnAbandonedCaptureGivesItsMemoryBack) {
  const auto round = [&] {
    const auto pool = runtime().create_pool();
    const StreamGuard guard(runtime(), capture());
    runtime().begin_capture(capture(), pool);
    const auto inside = filled(1, 4 << 20);
    runtime().abandon_capture(capture());
  };
  runtime().synchronize_device();
  round();
  runtime().release_cached_memory();
  const auto before = runtime().memory_stats();
  round();
  runtime().release_cached_memory();
  EXPECT_EQ(runtime().memory_stats().reserved, before.reserved);
  EXPECT_EQ(runtime().memory_stats().allocated, before.allocated);
}

SIDESTREAM_ON_EVERY_BACKEND(LifetimeContract);

}  // namespace
}  // namespace sidestream::contract
