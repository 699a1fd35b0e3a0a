// What the journal hears of LibTorch's own streams and events on a GPU: none of a correct model's orders is missed, and what a
// model forgets is found.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/core/Event.h>
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

/// Streams of LibTorch's pool, whose ids are not the driver's handles.
class GpuModelEvents : public gpu::Gpu {
 protected:
  void SetUp() override {
    gpu::Gpu::SetUp();
    if (IsSkipped()) {
      return;
    }
    checked_ = std::make_shared<CheckedRuntime>(make_runtime(device_));
    checked_->begin_step(1);
    observing_.emplace([this](const OperatorAccess& access) { checked_->observe(access); });
    const c10::impl::VirtualGuardImpl streams(device_.type());
    a_.emplace(streams.getStreamFromGlobalPool(device_));
    b_.emplace(streams.getStreamFromGlobalPool(device_));
  }
  void TearDown() override {
    observing_.reset();
    if (checked_ != nullptr) {
      runtime().synchronize_device();
    }
  }
  template <class Body>
  static at::Tensor on(c10::Stream stream, const Body& body) {
    const c10::StreamGuard guard(stream);
    return body();
  }
  [[nodiscard]] c10::Stream a() const { return *a_; }
  [[nodiscard]] c10::Stream b() const { return *b_; }
  void expect_clean() { EXPECT_EQ(checked_->findings(), std::vector<std::string>()); }
  void expect_found(const std::string& first, const std::string& second) {
    const std::vector<std::string> found = checked_->findings();
    ASSERT_FALSE(found.empty());
    EXPECT_NE(found[0].find(first), std::string::npos) << found[0];
    EXPECT_NE(found[0].find(second), std::string::npos) << found[0];
  }

  c10::Device device_ = tested_gpu();
  std::shared_ptr<CheckedRuntime> checked_;
  std::optional<OperatorObserverGuard> observing_;
  std::optional<c10::Stream> a_;
  std::optional<c10::Stream> b_;
};

TEST_F(GpuModelEvents, ForksAndJoinsOfBothKindsOfEventAreSeen) {
  const at::Tensor x = on(a(), [&] { return at::ones({1024}, options()); });
  order(a(), b());
  const at::Tensor y = on(b(), [&] { return x.exp(); });
  at::cuda::CUDAEvent joined;
  joined.record(at::cuda::CUDAStream(b()));
  joined.block(at::cuda::CUDAStream(a()));
  const at::Tensor z = on(a(), [&] { return x + y; });
  expect_clean();
}

TEST_F(GpuModelEvents, AForgottenJoinIsFound) {
  const at::Tensor x = on(a(), [&] { return at::ones({1024}, options()); });
  order(a(), b());
  const at::Tensor y = on(b(), [&] { return x.exp(); });
  const at::Tensor z = on(a(), [&] { return x + y; });
  expect_found("aten::exp", "aten::add");
}

TEST_F(GpuModelEvents, TheDefaultStreamIsOneStream) {
  const c10::impl::VirtualGuardImpl streams(device_.type());
  const c10::Stream main = streams.getDefaultStream(device_);
  const at::Tensor x = on(main, [&] { return at::ones({1024}, options()); });
  order(main, b());
  const at::Tensor y = on(b(), [&] { return x.exp(); });
  order(b(), main);
  const at::Tensor z = on(main, [&] { return x + y; });
  expect_clean();
}

TEST_F(GpuModelEvents, BackwardOverTwoStreamsIsOrderedByAutograd) {
  const at::Tensor leaf = on(a(), [&] { return at::ones({1024}, options()).requires_grad_(true); });
  const at::Tensor x = on(a(), [&] { return leaf.mul(2); });
  order(a(), b());
  for (int i = 0; i < 4; ++i) {
    const at::Tensor z = on(a(), [&] { return x.tanh(); });
    const at::Tensor y = on(b(), [&] { return x.exp().mul(0.5); });
    order(b(), a());
    y.record_stream(a());
    (void)on(a(), [&] {
      const at::Tensor loss = (y * z).sum();
      return torch::autograd::grad({loss}, {leaf}, {}, /*retain_graph=*/true)[0];
    });
    order(a(), b());
  }
  expect_clean();
}

TEST_F(GpuModelEvents, WhatTheHostHasSeenIsOrdered) {
  at::Tensor x = on(a(), [&] { return at::ones({1024}, options()); });
  a().synchronize();
  x = on(b(), [&] { return x.exp(); });
  c10::Event event(device_.type());
  event.record(b());
  event.synchronize();
  x = on(a(), [&] { return x.exp(); });
  {
    const c10::StreamGuard on_a(a());
    EXPECT_GT(x.sum().item<float>(), 0.0F);
  }
  (void)on(b(), [&] { return x.add_(1); });
  expect_clean();
}

TEST_F(GpuModelEvents, AHostWriteMustWaitForTheCopyThatReads) {
  at::Tensor batch = at::ones({1024}).pin_memory();
  at::Tensor x = on(a(), [&] { return batch.to(device_, /*non_blocking=*/true); });
  a().synchronize();
  batch.add_(1);
  expect_clean();
  x = on(a(), [&] { return batch.to(device_, true); });
  batch.add_(1);
  expect_found("reads pinned host memory", "aten::add_ by the host");
}

TEST_F(GpuModelEvents, AHostReadMustWaitForTheCopyThatWrites) {
  const at::Tensor x = on(a(), [&] { return at::ones({1024}, options()); });
  const at::Tensor result = at::empty({1024}).pin_memory();
  (void)on(a(), [&] { return result.copy_(x); });
  (void)result.sum();
  expect_clean();
  (void)on(a(), [&] { return result.copy_(x, /*non_blocking=*/true); });
  (void)result.sum();
  expect_found("writes pinned host memory", "aten::sum by the host");
}

TEST_F(GpuModelEvents, MemoryHandedOnByRecordStreamIsOrdered) {
  for (int i = 0; i < 8; ++i) {
    const at::Tensor x = on(a(), [&] { return at::ones({1024}, options()); });
    order(a(), b());
    (void)on(b(), [&] { return x.exp(); });
    if (i % 2 == 0) {
      x.record_stream(b());
    } else {
      c10::impl::getDeviceGuardImpl(device_.type())->recordDataPtrOnStream(x.storage().data_ptr(), b());
    }
    runtime().synchronize(b());  // past the journal: so that the allocator finds it done
  }
  expect_clean();
}

TEST_F(GpuModelEvents, FreedMemoryThatAnotherStreamReadsIsFound) {
  at::Tensor x = on(a(), [&] { return at::ones({1024}, options()); });
  order(a(), b());
  const at::Tensor y = on(b(), [&] { return x.exp(); });
  const void* address = x.data_ptr();
  x.reset();
  x = on(a(), [&] { return at::zeros({1024}, options()); });
  ASSERT_EQ(x.data_ptr(), address);
  expect_found("aten::exp", "writes");
}

TEST_F(GpuModelEvents, AForkInsideACaptureIsPartOfTheGraph) {
  const OwnedStream stream = checked_->create_stream();
  const at::Tensor x = on(stream, [&] { return at::ones({1024}, options()); });
  checked_->synchronize(stream);
  const MemoryPool pool = checked_->create_pool();
  checked_->begin_capture(stream, pool, {});
  const at::Tensor kept = on(stream, [&] {
    order(stream, b());
    const at::Tensor y = on(b(), [&] { return x.exp(); });
    const at::Tensor z = x.tanh();
    order(b(), stream);
    return y + z;
  });
  const Graph graph = checked_->end_capture(stream);
  checked_->launch(graph, stream);
  checked_->launch(graph, stream);
  expect_clean();
  runtime().synchronize_device();
}

TEST_F(GpuModelEvents, AForkingModelUnderTheEngineIsClean) {
  observing_.reset();
  torch::nn::Module model;
  OffloadEngine engine(model, Options(device_).groups_in_flight(1).offload("**").check_steps(6));
  std::vector<at::Tensor> inputs;  // which outlive every stream's work
  for (std::uint64_t s = 0; s < 6; ++s) {
    at::manual_seed(s);
    inputs.push_back(at::randn({512, 1024}).to(device_).requires_grad_(true));
  }
  runtime().synchronize_device();
  for (const at::Tensor& x : inputs) {
    const auto step = engine.step();
    const c10::StreamGuard on_a(a());
    const TwoStreams streams{a(), b(), order, order};
    const at::Tensor h = streams.forked_layers(x, std::vector<const char*>(4, "experts"));
    (void)torch::autograd::grad({h.sum()}, {x});
  }
  EXPECT_GT(engine.report().offloaded_bytes, 0);
  EXPECT_EQ(engine.report().order_findings, std::vector<std::string>());
}

}  // namespace
}  // namespace sidestream::testing_model
