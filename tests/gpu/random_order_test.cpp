// Graphs that draw, launched on streams that never meet: each gets the numbers that eager draws in their place would give.
#include <vector>

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/cuda/Sleep.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>
#include <c10/cuda/CUDAGuard.h>
#include <gtest/gtest.h>

#include "gpu/gpu_fixture.h"
#include "runtime/draw_order.h"

namespace sidestream::gpu {
namespace {

class RandomOrderOnGpu : public Gpu {
 protected:
  static constexpr int kGraphs = 3;
  static constexpr std::int64_t kCycles = 20'000'000;  // some ten milliseconds

  void seed() const {
    at::Generator generator = at::globalContext().defaultGenerator(runtime().device());
    generator.set_current_seed(99);
  }
  [[nodiscard]] std::vector<at::Tensor> eager() const {
    seed();
    std::vector<at::Tensor> drawn;
    for (int i = 0; i < kGraphs; ++i) {
      drawn.push_back(at::rand({1000}, options()).cpu());
    }
    return drawn;
  }
  /// Each graph draws late, behind a kernel that spins.
  template <class Launch>
  [[nodiscard]] std::vector<at::Tensor> graphed(const Launch& launch) const {
    std::vector<OwnedStream> streams;
    std::vector<Graph> graphs;
    std::vector<at::Tensor> drawn;
    const MemoryPool pool = runtime().create_pool();
    at::cuda::sleep(1);  // its module is loaded outside of captures
    (void)at::rand({1000}, options());
    for (int i = 0; i < kGraphs; ++i) {
      streams.push_back(runtime().create_stream());
      runtime().synchronize_device();
      const c10::cuda::CUDAGuard device(runtime().device().index());
      const StreamGuard guard(runtime(), streams.back());
      runtime().begin_capture(streams.back(), pool);
      at::cuda::sleep(kCycles);
      drawn.push_back(at::rand({1000}, options()));
      graphs.push_back(runtime().end_capture(streams.back()));
      EXPECT_TRUE(runtime().draws(graphs.back()));
    }
    runtime().synchronize_device();
    seed();
    for (int i = 0; i < kGraphs; ++i) {
      launch(graphs[i], streams[i].get());
    }
    runtime().synchronize_device();
    std::vector<at::Tensor> results;
    for (const at::Tensor& each : drawn) {
      results.push_back(each.cpu());
    }
    return results;
  }
  static bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
    for (int i = 0; i < kGraphs; ++i) {
      if (!at::equal(a[i], b[i])) {
        return false;
      }
    }
    return true;
  }
};

TEST_F(RandomOrderOnGpu, InOrderEachDrawsWhatEagerWorkWould) {
  EXPECT_TRUE(same(graphed([&](const Graph& graph, c10::Stream stream) {
                     DrawOrder& order = DrawOrder::of(runtime().device());
                     std::recursive_mutex mutex;
                     std::unique_lock lock(mutex, std::defer_lock);
                     const auto drawing = order.lock_with(lock);
                     order.launch(runtime(), stream, [&] { runtime().launch(graph, stream); });
                   }),
                   eager()));
}

TEST_F(RandomOrderOnGpu, WithoutTheirOrderTheyDrawOtherNumbers) {
  if (testing_model::launches_block()) {
    GTEST_SKIP() << "no work is late where launches block";
  }
  EXPECT_FALSE(
      same(graphed([&](const Graph& graph, c10::Stream stream) { runtime().launch(graph, stream); }), eager()));
}

TEST_F(RandomOrderOnGpu, AGraphThatDrawsNothingSaysSo) {
  const auto stream = runtime().create_stream();
  const MemoryPool pool = runtime().create_pool();
  const at::Tensor x = at::rand({16}, options());
  runtime().synchronize_device();
  const StreamGuard guard(runtime(), stream);
  runtime().begin_capture(stream, pool);
  const at::Tensor y = x + 1;
  const Graph graph = runtime().end_capture(stream);
  EXPECT_FALSE(runtime().draws(graph));
}

}  // namespace
}  // namespace sidestream::gpu
