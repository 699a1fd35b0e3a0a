// Gradients of a sequence's inputs that a leaf is given in the graph's own memory: ordinary tensors, whatever is done with them. That they
// may be held is ReturnedGradientsTest's.
#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "models/stack_twins.h"
#include "runtime/runtime.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"
#include "unit/sim/rerun/every_order.h"
#include "warnings.h"

namespace sidestream::testing_model {
namespace {

class GivenGradientTest : public testing::Test, protected StackTwins {
 protected:
  GivenGradientTest() : StackTwins(find_device("sim"), 3) {}

  void capture() {
    StackTwins::capture(Options(device).graph("**"), {});
    graphed_ = true;
  }
  /// Of step `s`, with the graphs once they are captured.
  at::Tensor loss(const at::Tensor& x, std::int64_t s) { return StackTwins::loss(graphed_, x, s); }
  /// The gradient of a leaf in a pass of step `s`.
  at::Tensor pass(std::int64_t s) {
    const at::Tensor x = input(s);
    loss(x, s).backward();
    return x.grad();
  }
  /// What `run` gives with graphs is what it gives without.
  void expect_plain(const std::function<std::vector<at::Tensor>()>& run) {
    const StepTensors expected = values(run());
    capture();
    EXPECT_TRUE(same(values(run()), expected));
  }
  std::int64_t copied(const std::function<void()>& run) {
    in_step(&*engine, run);
    return engine->report().gradients_copied;
  }

  sim::OneThread one_thread_;
  bool graphed_ = false;
};

TEST_F(GivenGradientTest, OneLeafAddsUpThoseOfSeveralPasses) {
  expect_plain([&] {
    const at::Tensor x = input(0);
    for (std::int64_t s = 0; s < 4; ++s) {
      loss(x, s).backward();
    }
    return std::vector<at::Tensor>{x.grad()};
  });
}

TEST_F(GivenGradientTest, AskedForByNameItIsHeldAsWell) {
  expect_plain([&] {
    std::vector<at::Tensor> held;
    for (std::int64_t s = 0; s < 3; ++s) {
      const at::Tensor x = input(s);
      held.push_back(torch::autograd::grad({loss(x, s)}, {x})[0]);
    }
    return held;
  });
}

TEST_F(GivenGradientTest, WhatNobodyHoldsIsGivenOutAgainAndWhatIsHeldIsCopiedOutOnce) {
  capture();
  const void* place = nullptr;
  EXPECT_EQ(copied([&] { place = pass(0).const_data_ptr(); }), 0);
  at::Tensor held;
  EXPECT_EQ(copied([&] {
              held = pass(1);
              EXPECT_EQ(held.const_data_ptr(), place);
            }),
            0);
  EXPECT_EQ(copied([&] {
              EXPECT_EQ(pass(2).const_data_ptr(), place);
              EXPECT_NE(held.const_data_ptr(), place);
            }),
            1);
  EXPECT_EQ(copied([&] { EXPECT_EQ(pass(3).const_data_ptr(), place); }), 0);
}

/// Autograd hands it on from there: to other streams too, where no graph would wait for its readers.
TEST_F(GivenGradientTest, WhatAnOperatorTakesIsAClone) {
  capture();
  at::Tensor taken;
  const at::Tensor x = input(0);
  const at::Tensor between = x + 0;
  between.register_hook([&](const at::Tensor& grad) { taken = grad; });
  loss(between, 0).backward();
  EXPECT_EQ(copied([&] { (void)loss(input(1), 1); }), 0);
}

TEST_F(GivenGradientTest, WhatALeafTakesOnAnotherStreamIsAClone) {
  capture();
  const at::Tensor x = input(0);
  const auto runtime = make_runtime(device);
  const OwnedStream other = runtime->create_stream();
  const at::Tensor view = x.view_as(x);  // the leaf belongs to this stream from here on
  {
    const StreamGuard on_other(*runtime, other.get());
    const ExpectedWarnings of_streams;  // LibTorch says that the leaf's differs
    loss(x, 0).backward();
  }
  runtime->synchronize_device();
  EXPECT_EQ(copied([&] { (void)loss(input(1), 1); }), 0);
}

}  // namespace
}  // namespace sidestream::testing_model
