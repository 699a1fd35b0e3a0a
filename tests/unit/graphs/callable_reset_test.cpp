// GraphedCallable::reset of some of the callables that were captured together.
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "models/stack_twins.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/testing/simulator.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream::testing_model {
namespace {

/// Layers of which some are reset, and their plain twins. Those that were reset run as they are.
class CallableResetTest : public testing::Test, protected StackTwins {
 protected:
  CallableResetTest() : StackTwins(find_device("sim"), 5) {}

  void capture(const GraphOptions& options = {}, bool linked = true) {
    StackTwins::capture(options, linked);
    reset_.assign(layers.size(), false);
  }
  void reset(std::size_t layer) {
    layers[layer].reset();
    reset_[layer] = true;
  }
  void expect_plain(std::int64_t first, std::int64_t last) {
    for (std::int64_t s = first; s < last; ++s) {
      (void)StackTwins::expect_plain(s, [&](std::size_t i, const at::Tensor& h) {
        return reset_[i] ? model->at<Mlp>(i).forward(h) : run_layer(true, i, h);
      });
    }
  }

  sim::OneThread one_thread_;
  std::vector<bool> reset_;
};

TEST_F(CallableResetTest, TheOthersGoOnWhicheverIsReset) {
  for (const std::size_t gone : {0U, 2U, 4U}) {
    for (const std::int64_t side_streams : {1, 2}) {
      SCOPED_TRACE(std::to_string(gone) + ", K=" + std::to_string(side_streams));
      capture(GraphOptions().side_streams(side_streams));
      expect_plain(0, 2);
      reset(gone);
      expect_plain(2, 5);
    }
  }
}

TEST_F(CallableResetTest, OneAfterTheOtherBesideWeightsThatMove) {
  capture();
  std::int64_t s = 0;
  for (const std::size_t gone : {4U, 2U, 3U, 0U}) {
    reset(gone);
    if (s % 2 == 0) {  // else the weights move before the next pass
      expect_plain(s, s + 1);
    }
    relocate(*model);
    expect_plain(s + 1, s + 3);
    s += 3;
  }
  EXPECT_EQ(engine->report().recaptures, 4 + 3 + 2 + 1);
  for (const std::size_t gone : {0U, 2U, 3U, 4U}) {
    EXPECT_THROWS(UsageError, "replayed after reset", (void)layers[gone]({input(0)}));
  }
}

TEST_F(CallableResetTest, TheOthersGoOnUnderSchedules) {
  for (const char* name : {"late", "d2h-early", "d2h-late", "seed:1", "seed:2"}) {
    SCOPED_TRACE(name);
    set_schedule(device, Schedule::parse(name));
    capture();
    expect_plain(0, 1);
    reset(1);
    reset(3);
    expect_plain(1, 4);
  }
  set_schedule(device, Schedule());
}

TEST_F(CallableResetTest, TwoReadersOfOneOutputWhereTheSecondWasLinkedToTheResetOne) {
  for (const char* name : {"late", "early", "seed:1"}) {
    SCOPED_TRACE(name);
    set_schedule(device, Schedule::parse(name));
    capture();
    reset(2);
    const auto two_readers = [&](torch::nn::Sequential& model, bool graphed, std::int64_t s) {
      const at::Tensor x = rows(s, device).requires_grad_(true);
      StepTensors result = train_step(*model, nullptr, [&] {
        const auto layer = [&](std::size_t i, const at::Tensor& h) {
          // Two readers: plain training adds a call's gradients up before they meet only where the call has a view of its own.
          return graphed ? layers[i]({h})[0] : (model->begin() + static_cast<std::ptrdiff_t>(i))->forward(h.view_as(h));
        };
        const at::Tensor a = layer(0, x);
        const at::Tensor b = layer(1, a);
        const at::Tensor c = layer(3, a);
        ((b * rows(s, device, 1)).mean() + (c * rows(s, device, 2)).mean()).backward();
      });
      result.emplace_back("gradient of the input", x.grad());
      return result;
    };
    testing_model::expect_plain(
        0, 3, [&](std::int64_t s) { return two_readers(model, true, s); },
        [&](std::int64_t s) { return two_readers(plain, false, s); });
  }
  set_schedule(device, Schedule());
}

TEST_F(CallableResetTest, BetweenAForwardAndItsBackward) {
  capture();
  expect_plain(0, 2);
  const at::Tensor x = rows(0, device).requires_grad_(true);
  at::Tensor h = layers[1](layers[0]({x}))[0];
  layers[1].reset();
  EXPECT_THROWS(UsageError, "reset before this backward", h.sum().backward());
  h.reset();
  reset_[1] = true;
  EXPECT_THROWS(UsageError, "replayed after reset", (void)layers[1]({rows(0, device).requires_grad_(true)}));
  expect_plain(2, 4);
}

TEST_F(CallableResetTest, WhatIsHeldOfItsOutputsStays) {
  capture();
  at::Tensor held;
  at::Tensor h = rows(7, device).requires_grad_(true);
  for (std::size_t i = 0; i < 5; ++i) {
    h = layers[i]({h})[0];
    held = i == 2 ? h.detach() : held;
  }
  h.sum().backward();
  model->zero_grad();
  const at::Tensor expected = held.cpu();
  reset(2);
  EXPECT_TRUE(at::equal(held.cpu(), expected));
  expect_plain(0, 3);
  EXPECT_TRUE(at::equal(held.cpu(), expected)) << "the other graphs write their pool";
  for (const std::size_t layer : {0U, 1U, 3U, 4U}) {
    reset(layer);
  }
  expect_plain(3, 4);
  EXPECT_TRUE(at::equal(held.cpu(), expected));
}

TEST_F(CallableResetTest, AllOfThemGiveBackAll) {
  StackTwins::expect_plain(0, [&](std::size_t i, const at::Tensor& h) { return model->at<Mlp>(i).forward(h); });
  model->zero_grad();
  plain->zero_grad();
  synchronize(device);
  release_cached_memory(device);
  const MemoryUse before = memory_use(device);
  capture(GraphOptions(), /*linked=*/false);
  expect_plain(1, 3);
  model->zero_grad();
  plain->zero_grad();
  for (const std::size_t layer : {3U, 0U, 4U, 1U, 2U}) {
    reset(layer);
    reset(layer);
  }
  release_cached_memory(device);
  EXPECT_EQ(memory_use(device).allocated, before.allocated);
  EXPECT_EQ(memory_use(device).reserved, before.reserved);
}

}  // namespace
}  // namespace sidestream::testing_model
