// What a backward pass held is free behind the wait for its end.
#include <cstdint>

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "graphs/outputs/storage_holders.h"
#include "sidestream/device.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream {
namespace {

constexpr std::int64_t kRows = 256;
constexpr std::int64_t kSavedBytes = kRows * kRows * 4;

class EndOfBackwardTest : public testing::Test {
 protected:
  [[nodiscard]] std::int64_t allocated() const { return memory_use(device_).allocated; }
  [[nodiscard]] std::int64_t allocated_peak() const { return memory_use(device_).allocated_peak; }
  /// Autograd's thread holds the gradient a moment longer than its caller does here.
  void run_backward() const {
    const at::Tensor leaf = at::ones({kRows, kRows}, device_).requires_grad_(true);
    (void)torch::autograd::grad({leaf.exp().sum()}, {leaf});
  }

  const c10::Device device_ = find_device("sim");
};

TEST_F(EndOfBackwardTest, WhatItHeldIsFree) {
  for (int i = 0; i < 300; ++i) {
    const std::int64_t before = allocated();
    run_backward();
    await_end_of_backward(device_);
    ASSERT_LT(allocated() - before, kSavedBytes);
  }
}

TEST_F(EndOfBackwardTest, WaitsInInferenceModeToo) {
  for (int i = 0; i < 300; ++i) {
    const std::int64_t before = allocated();
    run_backward();
    const c10::InferenceMode inference;
    await_end_of_backward(device_);
    ASSERT_LT(allocated() - before, kSavedBytes);
  }
}

TEST_F(EndOfBackwardTest, WhereTheCallingThreadRunsBackwardsNothingIsAwaited) {
  const sim::OneThread one_thread;
  run_backward();
  reset_memory_peaks(device_);
  const std::int64_t before = allocated();
  await_end_of_backward(device_);
  EXPECT_EQ(allocated_peak(), before);
}

}  // namespace
}  // namespace sidestream
