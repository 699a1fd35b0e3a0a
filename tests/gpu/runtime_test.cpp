#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/csrc/autograd/autograd.h>

#include "gpu/gpu_fixture.h"
#include "runtime/link_speed.h"

namespace sidestream::gpu {
namespace {

using RuntimeOnGpu = Gpu;

TEST_F(RuntimeOnGpu, InfoNamesTheDeviceAndItsDriver) {
  const auto info = runtime().info();
  EXPECT_FALSE(info.name.empty());
  EXPECT_NE(info.driver.find("driver for CUDA"), std::string::npos);
  EXPECT_GT(info.memory_bytes, std::int64_t{1} << 30);
}

// A thread that never multiplied has no cuBLAS handle, and making one inside a capture breaks the capture.
TEST_F(RuntimeOnGpu, AMatrixProductIsCapturedOnAThreadThatNeverMultiplied) {
  const auto left = at::rand({256, 256}, options());
  const auto right = at::rand({256, 256}, options());
  const auto expected = at::mm(left, right);
  runtime().synchronize_device();
  at::Tensor product;
  Graph graph;
  const auto stream = runtime().create_stream();
  const auto pool = runtime().create_pool();
  std::thread other([&] {
    const StreamGuard guard(runtime(), stream);
    runtime().begin_capture(stream, pool);
    product = at::mm(left, right);
    graph = runtime().end_capture(stream);
  });
  other.join();
  runtime().launch(graph, stream);
  runtime().synchronize_device();
  EXPECT_TRUE(at::equal(product, expected));
}

// Backward runs on autograd's own device thread, whose cuBLAS handle is another one.
TEST_F(RuntimeOnGpu, ABackwardIsCapturedOnAutogradsDeviceThread) {
  const auto stream = runtime().create_stream();
  const auto weight = at::rand({256, 256}, options()).requires_grad_();
  const auto input = at::rand({64, 256}, options()).requires_grad_();
  const auto gradient = at::rand({64, 256}, options());
  const auto gradients = [&] {
    const auto output = at::linear(input, weight);
    return torch::autograd::grad({output}, {input, weight}, {gradient});
  };
  runtime().synchronize_device();
  torch::autograd::variable_list captured;
  Graph graph;
  const auto pool = runtime().create_pool();
  {
    const StreamGuard guard(runtime(), stream);
    runtime().begin_capture(stream, pool);
    captured = gradients();
    graph = runtime().end_capture(stream);
  }
  const auto expected = gradients();
  runtime().synchronize_device();
  runtime().launch(graph, stream);
  runtime().synchronize_device();
  EXPECT_TRUE(at::equal(captured[0], expected[0]));
  EXPECT_TRUE(at::equal(captured[1], expected[1]));
}

// What cuBLAS keeps for a handle and a stream must not come from a capture's pool: the pool would never be given back.
TEST_F(RuntimeOnGpu, TheMemoryOfACapturedBackwardIsGivenBack) {
  const auto stream = runtime().create_stream();
  const auto weight = at::rand({256, 256}, options()).requires_grad_();
  const auto gradient = at::rand({256, 256}, options());
  const auto round = [&](bool with_backward) {
    const StreamGuard guard(runtime(), stream);
    const auto pool = runtime().create_pool();
    runtime().begin_capture(stream, pool);
    const auto product = at::mm(weight, weight);
    torch::autograd::variable_list gradients;
    if (with_backward) {
      gradients = torch::autograd::grad({product}, {weight}, {gradient});
    }
    const auto graph = runtime().end_capture(stream);
    runtime().launch(graph, stream);
    runtime().synchronize_device();
  };
  // Autograd's device thread frees its last tensors some time after backward has returned.
  const auto reserved = [&] {
    runtime().release_cached_memory();
    return runtime().memory_stats().reserved;
  };
  round(false);
  const auto before = reserved();
  round(true);
  for (int i = 0; i < 100 && reserved() != before; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(reserved(), before);
}

TEST_F(RuntimeOnGpu, AStreamTakesItsWorkspacesWithIt) {
  const auto matrix = at::rand({256, 256}, options());
  (void)at::mm(matrix, matrix);
  runtime().synchronize_device();
  runtime().release_cached_memory();
  const auto before = runtime().memory_stats();
  for (int i = 0; i < 3; ++i) {
    const auto stream = runtime().create_stream();
    const StreamGuard guard(runtime(), stream);
    (void)at::mm(matrix, matrix);
    runtime().synchronize(stream);
  }
  runtime().release_cached_memory();
  EXPECT_EQ(runtime().memory_stats().allocated, before.allocated);
  EXPECT_EQ(runtime().memory_stats().reserved, before.reserved);
}

TEST_F(RuntimeOnGpu, AnAttentionBlockOfAMixedPrecisionIsCapturedForwardAndBackward) {
  const auto stream = runtime().create_stream();
  const auto half = options().dtype(at::kBFloat16);
  const auto query = at::rand({2, 8, 128, 64}, half).requires_grad_();
  const auto key = at::rand({2, 2, 128, 64}, half).requires_grad_();
  const auto value = at::rand({2, 2, 128, 64}, half).requires_grad_();
  const auto attend = [&] {
    return at::scaled_dot_product_attention(query, key, value, {}, 0.0, true, std::nullopt, true);
  };
  at::Tensor captured;
  Graph graph;
  const auto pool = runtime().create_pool();
  const auto expected = torch::autograd::grad({attend()}, {query}, {at::ones_like(query)})[0];
  runtime().synchronize_device();
  {
    const StreamGuard guard(runtime(), stream);
    runtime().begin_capture(stream, pool);
    const auto output = attend();
    captured = torch::autograd::grad({output}, {query}, {at::ones_like(output)})[0];
    graph = runtime().end_capture(stream);
  }
  runtime().launch(graph, stream);
  runtime().synchronize_device();
  EXPECT_TRUE(at::equal(captured, expected));
}

// Bounds that any real link keeps and that a copy which does not happen, or is not waited for, breaks.
TEST_F(RuntimeOnGpu, TheLinkIsFasterThanADiskAndSlowerThanDeviceMemory) {
  const auto speed = link_speed(runtime(), std::size_t{256} << 20);
  for (const double each : {speed.to_host, speed.to_device, speed.both}) {
    EXPECT_GT(each, 0.1);
    EXPECT_LT(each, 2000.0);
  }
  std::printf("link: to host %.1f, to device %.1f, both %.1f GB/s\n", speed.to_host, speed.to_device, speed.both);
}

TEST_F(RuntimeOnGpu, TheMainStreamLeavesAGraphBeforeItsCopyOfAGibibyte) {
  if (testing_model::launches_block()) {
    GTEST_SKIP() << "no work is late where launches block";
  }
  constexpr std::int64_t kElements = std::int64_t{256} << 20;
  const auto bytes = static_cast<std::size_t>(kElements) * sizeof(float);
  const auto stream = runtime().create_stream();
  const auto copies = runtime().create_stream();
  const auto main = runtime().create_stream();
  const auto pinned = runtime().allocate_pinned(bytes);
  std::memset(pinned.data(), 0, bytes);
  const auto input = at::full({kElements}, 1.0, options());
  const auto done = runtime().create_external_event();
  const auto fork = runtime().create_event();
  const auto join = runtime().create_event();
  const auto released = runtime().create_event();
  const auto pool = runtime().create_pool();
  runtime().synchronize_device();
  Graph graph;
  at::Tensor output;
  {
    const StreamGuard guard(runtime(), stream);
    runtime().begin_capture(stream, pool);
    output = input.add(1);
    runtime().record(done, stream);
    runtime().record(fork, stream);
    runtime().wait(copies, fork);
    runtime().copy_to_host(pinned.data(), output.const_data_ptr(), bytes, copies);
    runtime().record(join, copies);
    runtime().wait(stream, join);
    graph = runtime().end_capture(stream);
  }
  runtime().launch(graph, stream);
  runtime().wait(main, done);
  runtime().record(released, main);
  runtime().synchronize(released);
  EXPECT_FALSE(stream.get().query()) << "20 ms of copy were waited for";
  runtime().synchronize(stream);
  EXPECT_EQ(reinterpret_cast<const float*>(pinned.data())[kElements - 1], 2.0F);
}

}  // namespace
}  // namespace sidestream::gpu
