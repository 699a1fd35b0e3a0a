// Outputs of graphed calls that are held or read on another stream while the call replays, on a GPU.
#include <vector>

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include "gpu/gpu_fixture.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"
#include "stream_order.h"

namespace sidestream::testing_model {
namespace {

class GpuHeldOutputTest : public gpu::Gpu {
 protected:
  static constexpr std::int64_t kRows = 2048;

  void SetUp() override {
    Gpu::SetUp();
    if (!IsSkipped()) {
      const at::Tensor scale = at::full({1, kRows}, 1.5, options()).requires_grad_(true);
      function_ = [scale](const Tensors& in) { return Tensors{in[0] * scale}; };
      engine_ = std::make_unique<OffloadEngine>(model_, Options(device_));
      graphed_ = make_graphed_callables(*engine_, {Callable("scale", owning(function_))}, {{input(0)}});
    }
  }
  [[nodiscard]] at::Tensor input(double value) const {
    return at::full({kRows, kRows}, value, options()).requires_grad_(true);
  }
  /// Keeps the current stream busy for some milliseconds.
  void keep_busy() const {
    at::Tensor product = at::ones({4096, 4096}, options());
    for (int i = 0; i < 40; ++i) {
      product = at::mm(product, product).mul_(1e-4);
    }
  }

  c10::Device device_ = tested_gpu();
  torch::nn::Module model_;
  TensorFunction function_;
  std::unique_ptr<OffloadEngine> engine_;
  std::vector<GraphedCallable> graphed_;
};

TEST_F(GpuHeldOutputTest, KeepsItsBytes) {
  std::vector<at::Tensor> held;
  for (int s = 1; s < 6; ++s) {
    held.push_back(graphed_[0]({input(s)})[0].detach());
  }
  for (int s = 1; s < 6; ++s) {
    EXPECT_TRUE(at::equal(held[static_cast<std::size_t>(s - 1)].cpu(), function_({input(s)})[0].cpu())) << s;
  }
}

TEST_F(GpuHeldOutputTest, IsNotOverwrittenUnderAStreamThatRecordStreamNamed) {
  const c10::impl::VirtualGuardImpl streams(device_.type());
  const c10::Stream a = streams.getStreamFromGlobalPool(device_);
  const c10::Stream b = streams.getStreamFromGlobalPool(device_);
  const at::Tensor x = input(2);
  const at::Tensor next = input(3);
  streams.synchronizeDevice(device_.index());
  for (const bool held : {false, true}) {
    at::Tensor read;
    at::Tensor kept;
    {
      const c10::StreamGuard on_a(a);
      at::Tensor y = graphed_[0]({x})[0].detach();
      order(a, b);
      {
        const c10::StreamGuard on_b(b);
        y.record_stream(b);
        keep_busy();
        read = y.mul(2);
      }
      kept = held ? y : at::Tensor();
      y = at::Tensor();
      (void)graphed_[0]({next});
    }
    streams.synchronizeDevice(device_.index());
    EXPECT_TRUE(at::equal(read.cpu(), function_({x})[0].mul(2).cpu())) << held;
    EXPECT_TRUE(!held || at::equal(kept.cpu(), function_({x})[0].cpu()));
  }
}

TEST_F(GpuHeldOutputTest, IsNotOverwrittenUnderTheStreamThatItWasGivenOutOn) {
  const c10::impl::VirtualGuardImpl streams(device_.type());
  const c10::Stream a = streams.getStreamFromGlobalPool(device_);
  const c10::Stream b = streams.getStreamFromGlobalPool(device_);
  const at::Tensor x = input(2);
  const at::Tensor next = input(3);
  streams.synchronizeDevice(device_.index());
  at::Tensor read;
  {
    const c10::StreamGuard on_a(a);
    const at::Tensor y = graphed_[0]({x})[0].detach();
    keep_busy();
    read = y.mul(2);
  }
  {
    const c10::StreamGuard on_b(b);
    (void)graphed_[0]({next});
  }
  streams.synchronizeDevice(device_.index());
  EXPECT_TRUE(at::equal(read.cpu(), function_({x})[0].mul(2).cpu()));
}

}  // namespace
}  // namespace sidestream::testing_model
