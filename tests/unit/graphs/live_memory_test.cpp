// Live bytes of steps that replay graphs, against sizes that are known beforehand.
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "graphs/resources/step_memory.h"
#include "models/block_model.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/report.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream::testing_model {
namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

/// `count` MiB of zeros.
at::Tensor mebibytes(std::int64_t count, c10::Device device) {
  return at::zeros({count, kMiB / 4}, at::TensorOptions().device(device));
}

class LiveMemoryOfGraphsTest : public testing::Test {
 protected:
  [[nodiscard]] std::int64_t live() const { return memory_use(device_).live; }

  sim::OneThread one_thread_;  // autograd's own lets go of the last tensors of a backward a moment later
  c10::Device device_ = find_device("sim");
  torch::nn::Module model_;
};

TEST_F(LiveMemoryOfGraphsTest, TemporariesOfAReplayCountAtItsPeakAndNotAfter) {
  OffloadEngine engine(model_, Options(device_));
  const at::Tensor x = mebibytes(1, device_);
  const auto call = make_graphed_callables(engine, {Callable("call", owning([](const Tensors& in) {
                                                               const at::Tensor wide = in[0].repeat({8, 1});
                                                               const at::Tensor wider = wide.add(1);
                                                               return Tensors{wider.narrow(0, 0, 2).clone()};
                                                             }))},
                                           {{x}})[0];
  { const auto step = engine.step(); }  // sizing
  const std::int64_t before = live();
  reset_memory_peaks(device_);
  for (int s = 0; s < 3; ++s) {  // the first is measured, the others are like it
    const auto step = engine.step();
    const at::Tensor y = call({x})[0];
    EXPECT_EQ(live() - before, 0) << "the output was allocated by the capture";
  }
  EXPECT_EQ(memory_use(device_).live_peak - before, 16 * kMiB) << "18, of which the output's 2 were allocated before";
  EXPECT_EQ(engine.report().step_peak_bytes - before, 16 * kMiB);
}

TEST_F(LiveMemoryOfGraphsTest, WhatIsSavedCountsUntilItsBackward) {
  OffloadEngine engine(model_, Options(device_));
  const at::Tensor leaf = mebibytes(4, device_).requires_grad_();
  const auto call = make_graphed_callables(
      engine, {Callable("call", owning([](const Tensors& in) { return Tensors{in[0].exp().sin().sum()}; }))},
      {{leaf}})[0];
  { const auto step = engine.step(); }
  for (int s = 0; s < 2; ++s) {
    const auto step = engine.step();
    const std::int64_t before = live();
    const at::Tensor y = call({leaf.view_as(leaf)})[0];  // the leaf's own gradient would be the graph's memory
    EXPECT_EQ(live() - before, 4 * kMiB) << "exp's result, which is sin's input: one storage";
    y.backward();
    leaf.mutable_grad() = at::Tensor();
    EXPECT_EQ(live(), before);
  }
}

TEST_F(LiveMemoryOfGraphsTest, ABackwardThatAddsIntoGradHoldsOneGradientAtATime) {
  constexpr std::int64_t kWeights = 6;
  constexpr std::int64_t kSide = 512;  // a weight has 1 MiB, a row of activations 2 KiB
  std::vector<at::Tensor> weights;
  for (std::int64_t i = 0; i < kWeights; ++i) {
    weights.push_back(at::full({kSide, kSide}, 1e-3, at::TensorOptions().device(device_)).requires_grad_());
    weights.back().mutable_grad() = at::zeros_like(weights.back());
  }
  OffloadEngine engine(model_, Options(device_));
  const at::Tensor x = at::ones({1, kSide}, at::TensorOptions().device(device_)).requires_grad_();
  const auto body = owning([weights](const Tensors& in) {
    at::Tensor h = in[0];
    for (const at::Tensor& weight : weights) {
      h = h.mm(weight);
    }
    return Tensors{h};
  });
  const auto call = make_graphed_callables(engine, {Callable("call", body)}, {{x}},
                                           GraphOptions().gradients("**", GradientPolicy::accumulated))[0];
  for (int s = 0; s < 2; ++s) {
    const std::int64_t before = live();
    reset_memory_peaks(device_);
    {
      const auto step = engine.step();
      call({x})[0].sum().backward();
      x.mutable_grad() = at::Tensor();
    }
    EXPECT_GE(memory_use(device_).live_peak - before, kMiB);
    EXPECT_LT(memory_use(device_).live_peak - before, 2 * kMiB) << "one gradient of a weight, and a few rows";
  }
  for (const at::Tensor& weight : weights) {
    EXPECT_GT(weight.grad().abs().sum().cpu().item<float>(), 0);
  }
}

TEST_F(LiveMemoryOfGraphsTest, WhereEachStepIsAnotherFewAreMeasured) {
  StepMemory steps(make_runtime(device_));
  const auto step = [&](std::int64_t kibibytes) {
    steps.begin(/*captures=*/0);
    (void)at::zeros({kibibytes << 10}, at::TensorOptions().device(device_).dtype(at::kByte));
    return steps.end().live;
  };
  std::int64_t changes = 0;
  std::int64_t before = step(1);
  for (std::int64_t s = 0; s < 300; ++s) {
    const std::int64_t now = step(2 + s);
    changes += now != before ? 1 : 0;
    before = now;
  }
  EXPECT_GT(changes, 0);
  EXPECT_LT(changes, 20);
  for (int s = 0; s < 70; ++s) {
    before = step(3);
  }
  EXPECT_EQ(before, live() + (3 << 10)) << "alike again";
}

TEST_F(LiveMemoryOfGraphsTest, StepsThatTakeTurnsHaveAPeakEach) {
  for (const int period : {2, 3, 4}) {
    OffloadEngine engine(model_, Options(device_));
    { const auto step = engine.step(); }  // sizing
    const std::int64_t before = live();
    for (int s = 0; s < 60; ++s) {
      const std::int64_t size = s % period == 0 ? 5 : 1;
      {
        const auto step = engine.step();
        (void)mebibytes(size, device_);
      }
      if (s > 30) {
        EXPECT_EQ(engine.report().step_peak_bytes - before, size * kMiB) << period << ", step " << s;
      }
    }
  }
}

TEST_F(LiveMemoryOfGraphsTest, APassThatIsDroppedHoldsNothing) {
  OffloadEngine engine(model_, Options(device_));
  const at::Tensor x = mebibytes(4, device_).requires_grad_();
  const auto call = make_graphed_callables(
      engine, {Callable("call", owning([](const Tensors& in) { return Tensors{in[0].exp().sum()}; }))}, {{x}})[0];
  { const auto step = engine.step(); }
  const std::int64_t idle = live();
  {
    const auto step = engine.step();
    (void)call({x});
  }
  EXPECT_EQ(live(), idle) << "its node is gone, and with it the backward";
}

/// Steps whose peak is where their backward begins, with whatever offload.
class OffloadedPeakTest : public LiveMemoryOfGraphsTest, public testing::WithParamInterface<std::string> {
 protected:
  [[nodiscard]] Report report(const Options& options) const {
    BlockModel::Shape shape;
    shape.layers = 8;
    BlockModel model(shape);
    model.to(device_);
    OffloadEngine engine(model, options);
    for (std::int64_t s = 0; s < 4; ++s) {
      const auto step = engine.step();
      const at::Tensor loss = model.loss_of(s);
      (void)mebibytes(16, device_);
      loss.backward();
    }
    return engine.report();
  }
};

TEST_P(OffloadedPeakTest, FallsByWhatIsNotInFlightThen) {
  for (const std::size_t min_bytes : {1024, 8192}) {  // with the second, half of it leaves in blocks
    const Options options = Options(device_).min_bytes(min_bytes).graph(GetParam());
    const Report without = report(options);
    for (const std::size_t lag : {0, 100'000, 200'000}) {
      const Report with = report(Options(options).offload("blocks.*.*").lag(lag));
      EXPECT_GT(with.offloaded_bytes, 0) << lag;
      EXPECT_EQ(without.step_peak_bytes - with.step_peak_bytes, with.offloaded_bytes - with.in_flight_bytes) << lag;
      EXPECT_EQ(with.r_net() > with.r_gross(), with.in_flight_bytes > 0) << lag;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Calls, OffloadedPeakTest, testing::Values("", "blocks.*"),
                         [](const auto& info) { return info.param.empty() ? "eager" : "graphed"; });

}  // namespace
}  // namespace sidestream::testing_model
