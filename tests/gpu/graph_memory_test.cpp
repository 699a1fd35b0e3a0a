// Graphs on a device that is full, captures that cannot begin, and events of the default stream.
#include <functional>
#include <vector>

#include <ATen/cuda/Sleep.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include "expect_throws.h"
#include "gpu/gpu_fixture.h"
#include "graphs/sequence/sequence_streams.h"
#include "runtime/cuda/capture_mode.h"
#include "sidestream/graph_event.h"

namespace sidestream::gpu {
namespace {

/// All that the driver gives, past LibTorch, whose allocator has memory to give back in a pinch.
class RawMemory {
 public:
  explicit RawMemory(c10::DeviceIndex device) : device_(device) {}
  RawMemory(const RawMemory&) = delete;
  RawMemory& operator=(const RawMemory&) = delete;
  ~RawMemory() { clear(); }

  void take_all() {
    const c10::cuda::CUDAGuard device(device_);
    const cuda::RelaxedCapture relaxed;
    for (std::size_t piece = std::size_t{1} << 32; piece >= std::size_t{1} << 16;) {
      void* block = nullptr;
      if (cudaMalloc(&block, piece) == cudaSuccess) {
        blocks_.push_back(block);
      } else {
        (void)cudaGetLastError();
        piece /= 2;
      }
    }
  }
  void clear() {
    const c10::cuda::CUDAGuard device(device_);
    for (void* const block : blocks_) {
      (void)cudaFree(block);
    }
    blocks_.clear();
  }

 private:
  c10::DeviceIndex device_;
  std::vector<void*> blocks_;
};

class GraphMemoryOnGpu : public Gpu {
 protected:
  static constexpr int kNodes = 40'000;

  /// A graph of many nodes, so that what it takes of the device shows. `before_end` runs in its capture, on another stream.
  [[nodiscard]] Graph many_nodes(
      c10::Stream stream, const MemoryPool& pool, const at::Tensor& sum,
      const std::function<void()>& before_end = [] {}) const {
    const c10::Stream other = runtime().current_stream();
    const StreamGuard guard(runtime(), stream);
    runtime().begin_capture(stream, pool);
    for (int i = 0; i < kNodes; ++i) {
      sum.add_(1);
    }
    {
      const StreamGuard on_other(runtime(), other);
      before_end();
    }
    return runtime().end_capture(stream);
  }
  /// Tensors that leave less than a MiB of the device: the last come out of the small blocks of LibTorch's allocator.
  [[nodiscard]] std::vector<at::Tensor> fill_device() const {
    const c10::cuda::CUDAGuard device(runtime().device().index());
    const cuda::RelaxedCapture relaxed;
    std::vector<at::Tensor> hogs;
    for (std::int64_t piece = std::int64_t{1} << 32; piece >= std::int64_t{1} << 20;) {
      std::size_t free = 0;
      std::size_t total = 0;
      (void)cudaMemGetInfo(&free, &total);
      if (static_cast<std::int64_t>(free) < piece) {
        piece /= 2;
        continue;
      }
      try {
        hogs.push_back(at::empty({piece}, options().dtype(at::kByte)));
      } catch (const c10::OutOfMemoryError&) {
        piece /= 2;
      }
    }
    return hogs;
  }
};

TEST_F(GraphMemoryOnGpu, AGraphThatDoesNotFitBesideCachedMemoryGetsIt) {
  const auto stream = runtime().create_stream();
  const auto pool = runtime().create_pool();
  const at::Tensor sum = at::zeros({1}, options());
  runtime().synchronize_device();
  const Graph graph = many_nodes(stream, pool, sum, [&] { fill_device().clear(); });  // cached from here on
  runtime().launch(graph, stream);
  runtime().synchronize(stream);
  EXPECT_EQ(sum.item<float>(), static_cast<float>(kNodes));
  runtime().release_cached_memory();
}

TEST_F(GraphMemoryOnGpu, AGraphThatDoesNotFitAtAllIsADeviceErrorWithItsBytes) {
  const auto stream = runtime().create_stream();
  const auto pool = runtime().create_pool();
  const at::Tensor sum = at::zeros({1}, options());
  runtime().synchronize_device();
  runtime().release_cached_memory();
  RawMemory hogs(runtime().device().index());
  EXPECT_THROWS(DeviceError, "does not fit beside its tensors",
                (void)many_nodes(stream, pool, sum, [&] { hogs.take_all(); }));
  EXPECT_EQ(runtime().capture_status(stream), CaptureStatus::none);
  hogs.take_all();  // what the failed graph had taken
  EXPECT_THROWS(DeviceError, "the device is full", (void)many_nodes(stream, pool, sum));
  hogs.clear();
  EXPECT_EQ(runtime().capture_status(stream), CaptureStatus::none);
  const Graph graph = many_nodes(stream, pool, sum);
  EXPECT_TRUE(static_cast<bool>(graph));
}

bool refuse_fills = false;

at::Tensor& refusing_fill(at::Tensor& self, const at::Scalar& value) {
  TORCH_CHECK(!refuse_fills, "the fill was refused");
  return self.copy_(at::full({}, value, self.options().device(at::kCPU)).expand_as(self));
}

/// Hides that LibTorch warns where a kernel of its own is replaced.
class NoWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& /*warning*/) override {}
};

TEST_F(GraphMemoryOnGpu, ACaptureWhoseGeneratorCannotBeginLeavesTheGeneratorUsable) {
  const auto stream = runtime().create_stream();
  const auto pool = runtime().create_pool();
  (void)at::rand({16}, options());
  runtime().synchronize_device();
  {
    NoWarnings ignored;
    const c10::WarningUtils::WarningHandlerGuard no_warnings(&ignored);
    auto library = torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    library.impl("fill_.Scalar", refusing_fill);
    refuse_fills = true;
    const StreamGuard guard(runtime(), stream);
    EXPECT_THROWS(CaptureError, "the fill was refused", runtime().begin_capture(stream, pool));
    refuse_fills = false;
  }
  EXPECT_EQ(runtime().capture_status(stream), CaptureStatus::none);
  EXPECT_NO_THROW((void)at::rand({16}, options()));
  at::Tensor drawn;
  Graph graph;
  {
    const StreamGuard guard(runtime(), stream);
    runtime().begin_capture(stream, pool);
    drawn = at::rand({16}, options());
    graph = runtime().end_capture(stream);
  }
  runtime().launch(graph, stream);
  runtime().synchronize(stream);
  EXPECT_GT(drawn.sum().item<float>(), 0.0F);
}

// To the driver, the null stream is the current device's.
TEST_F(GraphMemoryOnGpu, AGraphEventOrdersTheDefaultStreamOfItsDevice) {
  const auto side = runtime().create_stream();
  const c10::Stream main = runtime().current_stream();
  const at::Tensor value = at::zeros({1 << 20}, options());
  runtime().synchronize_device();
  const GraphEvent event(runtime().device());
  {
    const c10::cuda::CUDAGuard device(runtime().device().index());
    const StreamGuard guard(runtime(), side);
    at::cuda::sleep(200'000'000);
    value.fill_(7);
  }
  runtime().record(GraphEventState::event_of(event), side);
  event.wait(main);
  const at::Tensor seen = value.clone();
  EXPECT_TRUE(at::equal(seen.cpu(), at::full({1 << 20}, 7.0F)));
}

}  // namespace
}  // namespace sidestream::gpu
