// A model's own streams and events on a GPU: with eager offload of scopes that fork a stream, and as the journal hears of them.
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/module.h>

#include "gpu/gpu_fixture.h"
#include "models/scopes.h"
#include "observe/checked_runtime.h"
#include "sidestream/engine.h"
#include "stream_order.h"

namespace sidestream::testing_model {
namespace {

class GpuStreamsTest : public gpu::Gpu {
 protected:
  /// Streams of LibTorch's pool, whose ids are not the driver's handles.
  struct Streams {
    explicit Streams(c10::Device device)
        : trunk(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)),
          branch(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)) {}
    /// Of the sum of layers that fork the branch.
    [[nodiscard]] at::Tensor gradient(const at::Tensor& x, std::size_t layers) const {
      const c10::StreamGuard on_trunk(trunk);
      const TwoStreams of_model{trunk, branch, order, order};
      const at::Tensor h = of_model.forked_layers(x, std::vector<const char*>(layers, "experts"));
      return torch::autograd::grad({h.sum()}, {x})[0];
    }
    c10::Stream trunk, branch;
  };
};

TEST_F(GpuStreamsTest, ForkedScopesGiveTheGradientsOfPlainTraining) {
  const c10::Device device = tested_gpu();
  const c10::impl::VirtualGuardImpl streams(device.type());
  const Streams of_model(device);
  const auto gradient = [&](const at::Tensor& x) { return of_model.gradient(x, 6); };
  torch::nn::Module model;
  OffloadEngine engine(model, Options(device).groups_in_flight(1).offload("**"));
  for (std::uint64_t s = 0; s < 6; ++s) {
    at::manual_seed(s);
    const at::Tensor x = at::randn({1024, 4096}).to(device).requires_grad_(true);
    streams.synchronizeDevice(device.index());
    const at::Tensor plain = gradient(x);
    streams.synchronizeDevice(device.index());  // nothing orders the trunk and the stream that copies to the host
    const at::Tensor expected = plain.cpu();
    at::Tensor mine;
    {
      const auto step = engine.step();
      mine = gradient(x);
    }
    streams.synchronizeDevice(device.index());
    EXPECT_TRUE(at::equal(mine.cpu(), expected)) << "step " << s;
  }
  EXPECT_GT(engine.report().offloaded_bytes, 0);
}

TEST_F(GpuStreamsTest, ForkedScopesUnderTheEngineAreInOrder) {
  const c10::Device device = tested_gpu();
  const Streams of_model(device);
  torch::nn::Module model;
  OffloadEngine engine(model, Options(device).groups_in_flight(1).offload("**").check_steps(6));
  std::vector<at::Tensor> inputs;  // which outlive every stream's work
  for (std::uint64_t s = 0; s < 6; ++s) {
    at::manual_seed(s);
    inputs.push_back(at::randn({512, 1024}).to(device).requires_grad_(true));
  }
  runtime().synchronize_device();
  for (const at::Tensor& x : inputs) {
    const auto step = engine.step();
    (void)of_model.gradient(x, 4);
  }
  EXPECT_GT(engine.report().offloaded_bytes, 0);
  EXPECT_EQ(engine.report().order_findings, std::vector<std::string>());
}

/// Beside c10::Event, whose cases are ModelEventsContract's.
TEST_F(GpuStreamsTest, ACudaEventOfAModelsOwnIsSeen) {
  const Streams of_model(tested_gpu());
  CheckedRuntime checked(make_runtime(tested_gpu()));
  checked.begin_step(1);
  const OperatorObserverGuard observing([&](const OperatorAccess& access) { checked.observe(access); });
  at::Tensor x;
  at::Tensor y;
  {
    const c10::StreamGuard on_trunk(of_model.trunk);
    x = at::ones({1024}, options());
  }
  order(of_model.trunk, of_model.branch);
  {
    const c10::StreamGuard on_branch(of_model.branch);
    y = x.exp();
  }
  at::cuda::CUDAEvent joined;
  joined.record(at::cuda::CUDAStream(of_model.branch));
  joined.block(at::cuda::CUDAStream(of_model.trunk));
  {
    const c10::StreamGuard on_trunk(of_model.trunk);
    (void)(x + y);
  }
  EXPECT_EQ(checked.findings(), std::vector<std::string>());
  runtime().synchronize_device();
}

}  // namespace
}  // namespace sidestream::testing_model
