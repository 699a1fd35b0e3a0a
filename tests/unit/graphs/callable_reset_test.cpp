// GraphedCallable::reset of some of the callables that were captured together.
#include <functional>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/testing/simulator.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream {
namespace {

using testing_model::layer_stack;
using testing_model::rows;
using testing_model::StepTensors;
using testing_model::train_step;

/// Layers of which some are reset, and their plain twins. Those that were reset run as they are.
class CallableResetTest : public testing::Test {
 protected:
  void capture(const GraphOptions& options = {}, bool linked = true) {
    layers_ = testing_model::graph_stack(engine_, model_, device_, options, linked);
    reset_.assign(layers_.size(), false);
  }
  void reset(std::size_t layer) {
    layers_[layer].reset();
    reset_[layer] = true;
  }
  StepTensors step(torch::nn::Sequential& model, bool graphed, std::int64_t s) {
    const at::Tensor x = rows(s, device_).requires_grad_(true);
    StepTensors result = train_step(*model, nullptr, [&] {
      at::Tensor h = x;
      for (std::size_t i = 0; i < model->size(); ++i) {
        h = graphed && !reset_[i] ? layers_[i]({h})[0] : (model->begin() + static_cast<std::ptrdiff_t>(i))->forward(h);
      }
      (h * rows(s, device_, 1)).mean().backward();
    });
    result.emplace_back("gradient of the input", x.grad());
    return result;
  }
  void expect_plain(std::int64_t first, std::int64_t last) {
    testing_model::expect_plain(
        first, last, [&](std::int64_t s) { return step(model_, true, s); },
        [&](std::int64_t s) { return step(plain_, false, s); });
  }
  /// Puts every parameter elsewhere, with the same values.
  static void relocate(torch::nn::Sequential& model) {
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : model->parameters()) {
      parameter.set_data(parameter.detach().clone());
    }
  }

  sim::OneThread one_thread_;
  c10::Device device_ = find_device("sim");
  torch::nn::Sequential model_ = layer_stack(5, device_);
  torch::nn::Sequential plain_ = layer_stack(5, device_);
  OffloadEngine engine_{*model_, Options(device_).offload("layers.*.*").min_bytes(1024)};
  std::vector<GraphedCallable> layers_;
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
    expect_plain(s, s + 1);
    relocate(model_);
    expect_plain(s + 1, s + 3);
    s += 3;
  }
  EXPECT_EQ(engine_.report().recaptures, 4 + 3 + 2 + 1);
}

TEST_F(CallableResetTest, TheOthersGoOnUnderSchedules) {
  for (const char* name : {"late", "d2h-early", "d2h-late", "seed:1", "seed:2"}) {
    SCOPED_TRACE(name);
    set_schedule(device_, Schedule::parse(name));
    capture();
    expect_plain(0, 1);
    reset(1);
    reset(3);
    expect_plain(1, 4);
  }
  set_schedule(device_, Schedule());
}

TEST_F(CallableResetTest, TwoReadersOfOneOutputWhereTheSecondWasLinkedToTheResetOne) {
  for (const char* name : {"late", "early", "seed:1"}) {
    SCOPED_TRACE(name);
    set_schedule(device_, Schedule::parse(name));
    capture();
    reset(2);
    const auto two_readers = [&](torch::nn::Sequential& model, bool graphed, std::int64_t s) {
      const at::Tensor x = rows(s, device_).requires_grad_(true);
      StepTensors result = train_step(*model, nullptr, [&] {
        const auto layer = [&](std::size_t i, const at::Tensor& h) {
          // Two readers: plain training adds a call's gradients up before they meet only where the call has a view of its own.
          return graphed ? layers_[i]({h})[0]
                         : (model->begin() + static_cast<std::ptrdiff_t>(i))->forward(h.view_as(h));
        };
        const at::Tensor a = layer(0, x);
        const at::Tensor b = layer(1, a);
        const at::Tensor c = layer(3, a);
        ((b * rows(s, device_, 1)).mean() + (c * rows(s, device_, 2)).mean()).backward();
      });
      result.emplace_back("gradient of the input", x.grad());
      return result;
    };
    testing_model::expect_plain(
        0, 3, [&](std::int64_t s) { return two_readers(model_, true, s); },
        [&](std::int64_t s) { return two_readers(plain_, false, s); });
  }
  set_schedule(device_, Schedule());
}

TEST_F(CallableResetTest, BetweenAForwardAndItsBackward) {
  capture();
  expect_plain(0, 2);
  const at::Tensor x = rows(0, device_).requires_grad_(true);
  at::Tensor h = layers_[1](layers_[0]({x}))[0];
  layers_[1].reset();
  EXPECT_THROWS(UsageError, "reset before this backward", h.sum().backward());
  h.reset();
  reset_[1] = true;
  EXPECT_THROWS(UsageError, "replayed after reset", (void)layers_[1]({rows(0, device_).requires_grad_(true)}));
  expect_plain(2, 4);
}

TEST_F(CallableResetTest, WhatIsHeldOfItsOutputsStays) {
  capture();
  at::Tensor held;
  at::Tensor h = rows(7, device_).requires_grad_(true);
  for (std::size_t i = 0; i < 5; ++i) {
    h = layers_[i]({h})[0];
    held = i == 2 ? h.detach() : held;
  }
  h.sum().backward();
  model_->zero_grad();
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

TEST_F(CallableResetTest, WhatIsLeftIsCapturedAgainWhereWeightsAreRelocated) {
  capture();
  expect_plain(0, 1);
  reset(1);
  relocate(model_);
  expect_plain(1, 3);
  reset(3);
  relocate(model_);
  expect_plain(3, 5);
  reset(0);
  relocate(model_);
  expect_plain(5, 7);
  EXPECT_EQ(engine_.report().recaptures, 4 + 3 + 2);
  for (const std::size_t gone : {0U, 1U, 3U}) {
    EXPECT_THROWS(UsageError, "replayed after reset", (void)layers_[gone]({rows(0, device_).requires_grad_(true)}));
  }
}

TEST_F(CallableResetTest, AllOfThemGiveBackAll) {
  (void)step(model_, false, 0);
  (void)step(plain_, false, 0);
  model_->zero_grad();
  plain_->zero_grad();
  synchronize(device_);
  release_cached_memory(device_);
  const MemoryUse before = memory_use(device_);
  capture(GraphOptions(), /*linked=*/false);
  expect_plain(1, 3);
  model_->zero_grad();
  plain_->zero_grad();
  for (const std::size_t layer : {3U, 0U, 4U, 1U, 2U}) {
    reset(layer);
    reset(layer);
  }
  release_cached_memory(device_);
  EXPECT_EQ(memory_use(device_).allocated, before.allocated);
  EXPECT_EQ(memory_use(device_).reserved, before.reserved);
}

}  // namespace
}  // namespace sidestream
