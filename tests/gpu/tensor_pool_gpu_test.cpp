// TensorPool on a GPU: memory that is freed on one stream and used on another, captures, and what the driver is asked for.
#include <array>
#include <cstdint>
#include <set>

#include <ATen/cuda/Sleep.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "gpu/gpu_fixture.h"
#include "sidestream/device.h"
#include "sidestream/error.h"
#include "sidestream/tensor_pool.h"

namespace sidestream::gpu {
namespace {

using Memory = TensorPool::Memory;
constexpr std::int64_t kNumbers = 1 << 20;

class TensorPoolOnGpu : public Gpu, public testing::WithParamInterface<Memory> {
 protected:
  [[nodiscard]] c10::Device device() const { return runtime().device(); }
  [[nodiscard]] c10::Stream new_stream() const {
    return c10::impl::VirtualGuardImpl(device().type()).getStreamFromGlobalPool(device());
  }
};

TEST_P(TensorPoolOnGpu, TheNextUserWaitsForTheStreamThatFreed) {
  TensorPool pool(GetParam(), device());
  pool.plan({kNumbers}, at::kFloat, 1);
  pool.seal();
  const std::array<at::Tensor, 2> from{at::full({kNumbers}, 3, options()), at::full({kNumbers}, 5, options())};
  const std::array<at::Tensor, 2> to{at::full({kNumbers}, 0, options()), at::full({kNumbers}, 0, options())};
  const std::array<c10::Stream, 2> streams{new_stream(), new_stream()};
  at::cuda::sleep(1);  // its module is loaded before anything is queued
  synchronize(device());
  for (std::size_t i = 0; i < 2; ++i) {
    const c10::StreamGuard current(streams[i]);
    const at::Tensor tensor = pool.allocate({kNumbers}, at::kFloat);
    tensor.copy_(from[i], /*non_blocking=*/true);
    at::cuda::sleep(100'000'000);  // meanwhile the other stream asks for the memory
    to[i].copy_(tensor, /*non_blocking=*/true);
    pool.free(tensor);
  }
  synchronize(device());
  EXPECT_TRUE(at::equal(to[0], from[0]));
  EXPECT_TRUE(at::equal(to[1], from[1]));
}

TEST_P(TensorPoolOnGpu, ASealedPoolAsksTheDriverForNothing) {
  TensorPool pool(GetParam(), device());
  pool.plan({kNumbers}, at::kFloat, 2);
  pool.seal();
  synchronize(device());
  release_cached_memory(device());
  const MemoryUse before = memory_use(device());
  std::set<const void*> places;
  for (int i = 0; i < 100; ++i) {
    const at::Tensor a = pool.allocate({kNumbers}, at::kFloat);
    const at::Tensor b = pool.allocate({kNumbers}, at::kFloat);
    EXPECT_EQ(a.is_pinned(), GetParam() == Memory::host);
    places.insert({a.const_data_ptr(), b.const_data_ptr()});
    pool.free(b);
    pool.free(a);
  }
  EXPECT_EQ(places.size(), 2U);
  EXPECT_EQ(memory_use(device()).reserved, before.reserved);
  EXPECT_EQ(memory_use(device()).allocated, before.allocated);
  EXPECT_EQ(pool.statistics().hits, 200);
  EXPECT_EQ(pool.statistics().allocations_after_seal, 0);
}

TEST_P(TensorPoolOnGpu, ACaptureIsRefusedAndStaysValid) {
  TensorPool pool(GetParam(), device());
  const at::Tensor tensor = pool.allocate({4}, at::kFloat);
  const at::Tensor x = at::full({4}, 2, options());
  const c10::Stream stream = new_stream();
  const MemoryPool graph_memory = runtime().create_pool();
  synchronize(device());
  const c10::StreamGuard current(stream);
  runtime().begin_capture(stream, graph_memory);
  EXPECT_THROWS(UsageError, "on a stream that captures", (void)pool.allocate({4}, at::kFloat));
  EXPECT_THROWS(UsageError, "on a stream that captures", pool.free(tensor));
  const at::Tensor y = at::mul(x, 3);
  const Graph graph = runtime().end_capture(stream);
  runtime().launch(graph, stream);
  runtime().synchronize(stream);
  EXPECT_EQ(y[0].item<float>(), 6);
  pool.free(tensor);
  EXPECT_EQ(pool.statistics().in_use, 0);
}

INSTANTIATE_TEST_SUITE_P(InBothPlaces, TensorPoolOnGpu, testing::Values(Memory::host, Memory::device),
                         [](const auto& test) { return test.param == Memory::host ? "Host" : "Device"; });

}  // namespace
}  // namespace sidestream::gpu
