// The plan of graphed calls on a device that keeps time: how far copies may trail follows from what the link and the calls were seen to
// take.
#include <cstdint>
#include <string>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "gpu/gpu_fixture.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/report.h"

namespace sidestream::testing_model {
namespace {

constexpr std::int64_t kCalls = 8;
constexpr std::int64_t kSaved = std::int64_t{64} << 20;  // bytes that a call saves

class PacedPlanTest : public gpu::Gpu {
 protected:
  void SetUp() override {
    gpu::Gpu::SetUp();
    if (!IsSkipped()) {
      factor_ = at::zeros({4096, 4096}, at::TensorOptions().device(device_).dtype(at::kBFloat16));
      x_ = at::ones({kSaved / 4}, at::TensorOptions().device(device_)).requires_grad_();
    }
  }

  /// A call's work: saves `kSaved` bytes, which are of this call alone, beside so many products that nobody needs.
  [[nodiscard]] auto work(std::int64_t products) const {
    return owning([factor = factor_, products](const at::Tensor& x) {
      {
        const at::NoGradGuard no_grad;
        for (std::int64_t i = 0; i < products; ++i) {
          (void)at::mm(factor, factor);
        }
      }
      return x.mul(0.5).tanh().mul(0.9);
    });
  }

  /// Seconds of the device.
  [[nodiscard]] double forward_seconds(std::int64_t products) const {
    const auto runtime = make_runtime(device_);
    const Event begin = runtime->create_event(EventTiming::on);
    const Event end = runtime->create_event(EventTiming::on);
    for (int repeat = 0; repeat < 2; ++repeat) {  // the first one warms up
      runtime->record(begin, runtime->current_stream());
      (void)work(products)(x_);
      runtime->record(end, runtime->current_stream());
    }
    runtime->synchronize(end);
    return runtime->elapsed_ms(begin, end) * 1e-3;
  }

  [[nodiscard]] Report train(const Options& options, std::int64_t products, int steps) {
    torch::nn::Module model;
    OffloadEngine engine(model, options);
    const auto body = work(products);
    for (int s = 0; s < steps; ++s) {
      const auto step = engine.step();
      at::Tensor h = x_;
      for (std::int64_t i = 0; i < kCalls; ++i) {
        const std::string name = "layers." + std::to_string(i);
        h = call(name.c_str(), body, h);
      }
      h.sum().backward();
    }
    return engine.report();
  }
  [[nodiscard]] std::int64_t offloaded(std::int64_t products) {
    return train(Options(device_).graph("layers.*").offload("layers.*"), products, 3).offloaded_bytes;
  }

  c10::Device device_ = tested_gpu();
  at::Tensor factor_;
  at::Tensor x_;
};

TEST_F(PacedPlanTest, WhatTheLinkFallsBehindWithStaysOnTheDevice) {
  const double copy = static_cast<double>(kSaved) / (measure_link(device_).to_host * 1e9);
  constexpr std::int64_t kMany = 20;
  const double product = (forward_seconds(kMany) - forward_seconds(0)) / kMany;
  const auto products_for = [&](double seconds) {
    return static_cast<std::int64_t>((seconds - forward_seconds(0)) / product) + 1;
  };
  EXPECT_EQ(offloaded(products_for(4 * copy)), (kCalls - 2) * kSaved) << "copies keep pace: two calls are in flight";
  EXPECT_LT(offloaded(products_for(0.7 * copy)), (kCalls - 2) * kSaved) << "forwards would wait with two in flight";
  EXPECT_GE(offloaded(products_for(0.7 * copy)), kCalls / 2 * kSaved);
  EXPECT_EQ(offloaded(0), (kCalls - 2) * kSaved) << "a link that is far too slow: more in flight would be no cure";
}

TEST_F(PacedPlanTest, OneStepIsTracedOnTheDevicesClock) {
  const Report report = train(Options(device_).graph("layers.*").offload("layers.*").lag(0).lookahead(0), 0, 5);
  EXPECT_EQ(report.traced_step, 3);
  std::int64_t offloaded = 0;
  double waited = 0;
  for (const TimesReport& times : report.times) {
    offloaded += times.offloaded_bytes;
    waited += times.waited_seconds;
    EXPECT_EQ(times.offloaded_bytes > 0, times.offload_seconds > 0) << times.name;
    EXPECT_EQ(times.reloaded_bytes > 0, times.reload_seconds > 0) << times.name;
  }
  EXPECT_EQ(offloaded, report.offloaded_bytes);
  EXPECT_NEAR(waited, report.waited_seconds, 1e-9);
  EXPECT_GT(waited, 0) << "hardly any compute hides the copies";
  EXPECT_GT(report.traced_seconds, waited);
  EXPECT_GT(report.traced_seconds, report.offload_seconds);
}

TEST_F(PacedPlanTest, ABudgetHasAForecastOfMemoryAndOfTime) {
  const Options graphs = Options(device_).graph("layers.*");
  const std::int64_t budget = train(graphs, 1, 4).step_peak_bytes - 3 * kSaved;
  const Report report = train(Options(graphs).device_budget(static_cast<std::size_t>(budget)), 1, 8);
  EXPECT_GT(report.offloaded_bytes, 0);
  EXPECT_LE(report.step_peak_bytes, budget);
  EXPECT_EQ(report.step_peak_bytes, report.forecast_peak_bytes);
  EXPECT_GT(report.forecast_seconds, 0);
  EXPECT_GT(report.forecast_step_seconds, 0);
}

}  // namespace
}  // namespace sidestream::testing_model
