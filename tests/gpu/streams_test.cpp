// Eager offload of a model that forks a stream in each scope, on a GPU: the gradients of the same model without an engine.
#include <vector>

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/module.h>

#include "gpu/gpu_fixture.h"
#include "models/scopes.h"
#include "sidestream/engine.h"
#include "stream_order.h"

namespace sidestream::testing_model {
namespace {

class GpuStreamsTest : public gpu::Gpu {};

TEST_F(GpuStreamsTest, ForkedScopesGiveTheGradientsOfPlainTraining) {
  const c10::Device device = tested_gpu();
  const c10::impl::VirtualGuardImpl streams(device.type());
  const c10::Stream trunk = streams.getStreamFromGlobalPool(device);
  const c10::Stream branch = streams.getStreamFromGlobalPool(device);
  const auto gradient = [&](const at::Tensor& x) {
    const c10::StreamGuard on_trunk(trunk);
    const TwoStreams streams_of_model{trunk, branch, order, order};
    const at::Tensor h = streams_of_model.forked_layers(x, std::vector<const char*>(6, "experts"));
    return torch::autograd::grad({h.sum()}, {x})[0];
  };
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

}  // namespace
}  // namespace sidestream::testing_model
