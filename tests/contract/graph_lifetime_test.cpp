#include <thread>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/rand.h>

#include "contract/fixture.h"
#include "sidestream/error.h"

namespace sidestream::contract {
namespace {

class LifetimeContract : public RuntimeContract {
 protected:
  Graph capture_increment(const MemoryPool& pool, const at::Tensor& tensor) {
    runtime().synchronize_device();
    const StreamGuard guard(runtime(), capture());
    runtime().begin_capture(capture(), pool);
    tensor.add_(1);
    return runtime().end_capture(capture());
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
  Graph graph;
  {
    const StreamGuard guard(runtime(), capture());
    runtime().begin_capture(capture(), other_pool);
    tensor.add_(10);
    old_graph.reset();
    old_event.reset();
    old_external.reset();
    old_pinned = PinnedMemory();
    old_pool.reset();
    { const auto stream = runtime().create_stream(); }
    EXPECT_EQ(runtime().capture_status(capture()), CaptureStatus::active);
    tensor.add_(10);
    graph = runtime().end_capture(capture());
  }
  runtime().launch(graph, side());
  EXPECT_TRUE(all_equal(tensor, 22));
}

TEST_P(LifetimeContract, AnotherThreadMayWorkAndDestroyDuringACapture) {
  const auto pool = runtime().create_pool();
  const auto other_pool = runtime().create_pool();
  const auto tensor = filled(1);
  auto old_graph = capture_increment(pool, tensor);
  Graph graph;
  runtime().synchronize_device();
  {
    const StreamGuard guard(runtime(), capture());
    runtime().begin_capture(capture(), other_pool);
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
      EXPECT_TRUE(runtime().query(event));
      EXPECT_TRUE(runtime().idle(side()));
      EXPECT_EQ(reinterpret_cast<const float*>(pinned.data())[5], 3.0F);
    });
    other.join();
    EXPECT_EQ(runtime().capture_status(capture()), CaptureStatus::active);
    graph = runtime().end_capture(capture());
  }
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

class RandomContract : public RuntimeContract {
 protected:
  void seed(std::uint64_t value) {
    auto generator = at::globalContext().defaultGenerator(runtime().device());
    generator.set_current_seed(value);
  }
};

TEST_P(RandomContract, DrawsContinueAcrossReplaysAsInEagerMode) {
  constexpr int kRounds = 4;
  std::vector<std::vector<float>> eager;
  seed(17);
  for (int i = 0; i < 2 * kRounds; ++i) {
    eager.push_back(values(at::rand({1000}, options())));
  }
  EXPECT_NE(eager[0], eager[1]);

  const auto pool = runtime().create_pool();
  at::Tensor one;
  at::Tensor two;
  Graph graph;
  runtime().synchronize_device();
  {
    const StreamGuard guard(runtime(), capture());
    runtime().begin_capture(capture(), pool);
    one = at::rand({1000}, options());
    two = at::rand({1000}, options());
    graph = runtime().end_capture(capture());
  }
  seed(17);
  for (int i = 0; i < kRounds; ++i) {
    runtime().launch(graph, side());
    EXPECT_EQ(values(one), eager[static_cast<std::size_t>(2 * i)]) << "replay " << i;
    EXPECT_EQ(values(two), eager[static_cast<std::size_t>(2 * i + 1)]) << "replay " << i;
  }
}

TEST_P(RandomContract, ACaptureDrawsNothingFromTheGenerator) {
  seed(5);
  const auto expected = values(at::rand({64}, options()));
  seed(5);
  const auto pool = runtime().create_pool();
  for (const bool finish : {true, false}) {
    runtime().synchronize_device();
    const StreamGuard guard(runtime(), capture());
    runtime().begin_capture(capture(), pool);
    const auto drawn = at::rand({1000}, options());
    if (finish) {
      const auto graph = runtime().end_capture(capture());
    } else {
      runtime().abandon_capture(capture());
    }
  }
  EXPECT_EQ(values(at::rand({64}, options())), expected);
}

SIDESTREAM_ON_EVERY_BACKEND(LifetimeContract);
SIDESTREAM_ON_EVERY_BACKEND(RandomContract);

}  // namespace
}  // namespace sidestream::contract
