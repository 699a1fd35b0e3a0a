// Gradients of a sequence's inputs that a leaf is given in the graph's own memory: ordinary tensors, whatever is done with them.
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "runtime/runtime.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"
#include "unit/sim/rerun/every_order.h"
#include "warnings.h"

namespace sidestream {
namespace {

using testing_model::rows;
using testing_model::same;
using testing_model::StepTensors;

class GivenGradientTest : public testing::Test {
 protected:
  void capture(const GraphOptions& options = {}) {
    engine_.emplace(*model_, Options(device_).graph("**"));
    layers_ = testing_model::graph_stack(*engine_, model_, device_, options);
  }
  /// Of step `s`, with the graphs where they are captured.
  at::Tensor loss(const at::Tensor& x, std::int64_t s) {
    return (engine_ ? testing_model::run_stack(layers_, x) : model_->forward(x)).mul(rows(s, device_, 1)).sum();
  }
  [[nodiscard]] at::Tensor leaf(std::int64_t s) const { return rows(s, device_).requires_grad_(true); }
  static StepTensors values(const std::vector<at::Tensor>& tensors) {
    StepTensors all;
    for (const at::Tensor& tensor : tensors) {
      all.emplace_back("gradient", tensor);
    }
    return all;
  }
  /// What `run` gives with graphs is what it gives without.
  void expect_plain(const std::function<std::vector<at::Tensor>()>& run, const GraphOptions& options = {}) {
    const StepTensors plain = values(run());
    capture(options);
    EXPECT_TRUE(same(values(run()), plain));
  }
  std::int64_t copied(const std::function<void()>& run) {
    testing_model::in_step(&*engine_, run);
    return engine_->report().gradients_copied;
  }

  sim::OneThread one_thread_;
  const c10::Device device_ = find_device("sim");
  torch::nn::Sequential model_ = testing_model::layer_stack(3, device_);
  std::optional<OffloadEngine> engine_;
  std::vector<GraphedCallable> layers_;
};

TEST_F(GivenGradientTest, WhatIsHeldIsThatOfPlainTraining) {
  expect_plain([&] {
    std::vector<at::Tensor> held;
    for (std::int64_t s = 0; s < 4; ++s) {
      const at::Tensor x = leaf(s);
      loss(x, s).backward();
      held.push_back(x.grad());
      held.push_back(x.grad().t().slice(0, 3, 7));
    }
    return held;
  });
}

TEST_F(GivenGradientTest, OneThatIsHeldOverAForwardIsIntact) {
  expect_plain([&] {
    const at::Tensor x = leaf(0);
    loss(x, 0).backward();
    for (std::int64_t s = 1; s < 3; ++s) {
      (void)loss(leaf(s), s);  // its backward never comes
    }
    return std::vector<at::Tensor>{x.grad()};
  });
}

TEST_F(GivenGradientTest, OneLeafAddsUpThoseOfSeveralPasses) {
  expect_plain([&] {
    const at::Tensor x = leaf(0);
    for (std::int64_t s = 0; s < 4; ++s) {
      loss(x, s).backward();
    }
    return std::vector<at::Tensor>{x.grad()};
  });
}

TEST_F(GivenGradientTest, ThoseOfAFirstBackwardOutliveASecond) {
  expect_plain(
      [&] {
        const at::Tensor x = leaf(0);
        const at::Tensor y = engine_ ? testing_model::run_stack(layers_, x) : model_->forward(x);
        y.backward(rows(1, device_, 1), /*retain_graph=*/true);
        const at::Tensor first = x.grad();
        x.mutable_grad() = at::Tensor();
        y.backward(rows(2, device_, 1));
        return std::vector<at::Tensor>{first, x.grad()};
      },
      GraphOptions().retain_graph_in_backward(true));
}

TEST_F(GivenGradientTest, AskedForByNameItIsHeldAsWell) {
  expect_plain([&] {
    std::vector<at::Tensor> held;
    for (std::int64_t s = 0; s < 3; ++s) {
      const at::Tensor x = leaf(s);
      held.push_back(torch::autograd::grad({loss(x, s)}, {x})[0]);
    }
    return held;
  });
}

TEST_F(GivenGradientTest, AHeldOneOutlivesItsEngine) {
  std::vector<at::Tensor> plain;
  for (std::int64_t s = 0; s < 2; ++s) {
    const at::Tensor x = leaf(s);
    loss(x, s).backward();
    plain.push_back(x.grad());
  }
  capture();
  std::vector<at::Tensor> held;
  for (std::int64_t s = 0; s < 2; ++s) {
    const at::Tensor x = leaf(s);
    loss(x, s).backward();
    held.push_back(x.grad());
  }
  layers_.clear();
  engine_.reset();
  EXPECT_TRUE(same(values(held), values(plain)));
}

TEST_F(GivenGradientTest, WhatNobodyHoldsIsGivenOutAgainAndWhatIsHeldIsCopiedOutOnce) {
  capture();
  const auto pass = [&](std::int64_t s) {
    const at::Tensor x = leaf(s);
    loss(x, s).backward();
    return x.grad();
  };
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
  const at::Tensor x = leaf(0);
  const at::Tensor between = x + 0;
  between.register_hook([&](const at::Tensor& grad) { taken = grad; });
  loss(between, 0).backward();
  EXPECT_EQ(copied([&] { (void)loss(leaf(1), 1); }), 0);
}

TEST_F(GivenGradientTest, WhatALeafTakesOnAnotherStreamIsAClone) {
  capture();
  const at::Tensor x = leaf(0);
  const auto runtime = make_runtime(device_);
  const OwnedStream other = runtime->create_stream();
  const at::Tensor view = x.view_as(x);  // the leaf belongs to this stream from here on
  {
    const StreamGuard on_other(*runtime, other.get());
    const testing_model::ExpectedWarnings of_streams;  // LibTorch says that the leaf's differs
    loss(x, 0).backward();
  }
  runtime->synchronize_device();
  EXPECT_EQ(copied([&] { (void)loss(leaf(1), 1); }), 0);
}

}  // namespace
}  // namespace sidestream
