// Captures that share device memory: they use it by turns.
#include "sidestream/graph_pool.h"

#include <memory>
#include <optional>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "expect_throws.h"
#include "models/plain_twin.h"
#include "models/stack_twins.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sim/device/device.h"
#include "unit/graphs/called_stack.h"

namespace sidestream::testing_model {
namespace {

class GraphPoolTest : public testing::Test {
 protected:
  [[nodiscard]] GraphOptions pooled() const { return GraphOptions().pool(pool_); }

  c10::Device device_ = find_device("sim");
  std::shared_ptr<GraphPool> pool_ = std::make_shared<GraphPool>(device_);
};

TEST_F(GraphPoolTest, StacksOfTwoEnginesTrainByTurnsInAnyOrder) {
  StackTwins large(device_, 5, pooled());
  StackTwins small(device_, 3, pooled());
  std::int64_t step = 0;
  for (const int turn : {0, 1, 1, 0, 0, 1, 0, 1}) {
    (void)(turn == 0 ? large : small).expect_plain(step++);
  }
}

TEST_F(GraphPoolTest, HeldOutputsKeepTheirValuesWhereAnotherComputes) {
  StackTwins large(device_, 4, pooled());
  StackTwins small(device_, 2, pooled());
  const at::Tensor of_large = large.expect_plain(0);
  const at::Tensor large_then = of_large.clone();
  const at::Tensor of_small = small.expect_plain(1);
  const at::Tensor small_then = of_small.clone();
  (void)large.expect_plain(2);
  EXPECT_TRUE(at::equal(of_large, large_then));
  EXPECT_TRUE(at::equal(of_small, small_then));
}

TEST_F(GraphPoolTest, OutOfOrderReplaysAreRejected) {
  StackTwins first(device_, 2, pooled());
  StackTwins second(device_, 2, pooled());
  const at::Tensor x = rows(0, device_).requires_grad_(true);
  const at::Tensor y = first.forward(true, x);
  EXPECT_THROWS(UsageError, "which shares its memory, is still pending", (void)second.forward(true, x));
  (y * rows(0, device_, 1)).sum().backward();
  const at::Tensor z = first.plain->forward(x);
  const at::Tensor expected = torch::autograd::grad({(z * rows(0, device_, 1)).sum()}, {x})[0];
  EXPECT_TRUE(at::equal(x.grad(), expected));
  (void)second.expect_plain(1);
}

TEST_F(GraphPoolTest, AForwardThatIsGivenUpLetsOthersHaveTheirTurn) {
  StackTwins first(device_, 2, pooled());
  StackTwins second(device_, 2, pooled());
  (void)first.forward(true, rows(0, device_).requires_grad_(true));
  (void)second.expect_plain(0);
  (void)first.expect_plain(1);
}

TEST_F(GraphPoolTest, ARetainedBackwardIsRefusedOnceAnotherHadItsTurn) {
  StackTwins first(device_, 2, pooled().retain_graph_in_backward(true));
  StackTwins second(device_, 2, pooled());
  const at::Tensor x = rows(0, device_).requires_grad_(true);
  const at::Tensor y = first.forward(true, x);
  const at::Tensor loss = (y * rows(0, device_, 1)).sum();
  loss.backward({}, /*retain_graph=*/true);
  loss.backward({}, /*retain_graph=*/true);
  (void)second.expect_plain(1);
  EXPECT_THROWS(UsageError, "another capture in the same memory", loss.backward());
  (void)first.expect_plain(2);
}

TEST_F(GraphPoolTest, APoolOfAnotherDeviceIsRefused) {
  torch::nn::Sequential model = layer_stack(1, device_);
  OffloadEngine engine(*model, Options(device_));
  const auto other = std::make_shared<GraphPool>(c10::Device(c10::kCPU));
  EXPECT_THROWS(UsageError, "GraphOptions::pool is a pool of cpu",
                (void)graph_stack(engine, model, device_, GraphOptions().pool(other)));
  StackTwins works(device_, 1, pooled());
  (void)works.expect_plain(0);
}

TEST_F(GraphPoolTest, ACaptureWaitsForPendingBackwardsOfThePool) {
  StackTwins first(device_, 2, pooled());
  const at::Tensor x = rows(0, device_).requires_grad_(true);
  const at::Tensor y = first.forward(true, x);
  EXPECT_THROWS(UsageError, "a capture in a pool that others use", StackTwins(device_, 2, pooled()));
  (y * rows(0, device_, 1)).sum().backward();
  StackTwins second(device_, 2, pooled());
  (void)second.expect_plain(0);
  (void)first.expect_plain(1);
}

// Weights that lie elsewhere for a while, as in an evaluation of averaged ones.
TEST_F(GraphPoolTest, CallsRunEagerlyWhileABackwardOfTheOtherEngineIsPending) {
  CalledStack first(device_), plain_first(device_), second(device_), plain_second(device_);
  const Options options = Options(device_).graph("layers.*").graph_options(pooled());
  OffloadEngine of_first(first, options);
  OffloadEngine of_second(second, options);
  const auto loss_of = [&](CalledStack& model, std::int64_t s) {
    return model.forward(rows(s, device_)).square().mean();
  };
  for (std::int64_t s = 0; s < 4; ++s) {
    expect_same_step(first, &of_first, plain_first, s, [&](CalledStack& model) {
      const bool graphed = &model == &first;
      CalledStack& other = graphed ? second : plain_second;
      const at::Tensor loss = loss_of(model, s);
      StepTensors of_other = train_step(other, graphed ? &of_second : nullptr, [&] { loss_of(other, s).backward(); });
      loss.backward();
      return of_other;
    });
  }
  EXPECT_EQ(of_second.report().captures, 0);
  EXPECT_EQ(of_second.report().eager_calls, 12);
  for (std::int64_t s = 4; s < 6; ++s) {
    expect_same_step(second, &of_second, plain_second, s, [&](CalledStack& model) { loss_of(model, s).backward(); });
  }
  EXPECT_EQ(of_second.report().captures, 6);
}

TEST_F(GraphPoolTest, ACaptureAgainThatHasToWaitLeavesTheFormerOne) {
  StackTwins first(device_, 2, pooled());
  StackTwins second(device_, 2, pooled());
  (void)first.expect_plain(0);
  const at::Tensor x = rows(1, device_).requires_grad_(true);
  const at::Tensor y = second.forward(true, x);
  const at::Tensor weight = first.model->parameters()[0];
  const at::Tensor weights = weight.detach();
  weight.set_data(weights.clone());
  EXPECT_THROWS(UsageError, "a capture in a pool that others use",
                (void)first.forward(true, rows(2, device_).requires_grad_(true)));
  weight.set_data(weights);
  (y * rows(1, device_, 1)).sum().backward();
  (void)first.expect_plain(3);
  EXPECT_EQ(first.engine->report().recaptures, 0);
}

TEST_F(GraphPoolTest, OutputsHeldOverACaptureInThePoolKeepTheirValues) {
  StackTwins first(device_, 2, pooled());
  const at::Tensor held = first.expect_plain(0);
  const at::Tensor then = held.clone();
  StackTwins second(device_, 4, pooled());
  (void)second.expect_plain(0);
  EXPECT_TRUE(at::equal(held, then));
}

TEST_F(GraphPoolTest, TheEngineMayGoBeforeItsPool) {
  std::optional<StackTwins> first(std::in_place, device_, 3, pooled());
  StackTwins second(device_, 2, pooled());
  const at::Tensor held = first->expect_plain(0);
  const at::Tensor then = held.clone();
  first.reset();
  (void)second.expect_plain(0);
  EXPECT_TRUE(at::equal(held, then));
}

TEST_F(GraphPoolTest, ThePoolMayGoBeforeItsEngines) {
  StackTwins first(device_, 2, pooled());
  StackTwins second(device_, 2, pooled());
  pool_.reset();
  (void)first.expect_plain(0);
  (void)second.expect_plain(0);
  (void)first.expect_plain(1);
}

TEST_F(GraphPoolTest, OneThatIsResetLeavesTheOthersAsTheyAre) {
  StackTwins first(device_, 2, pooled());
  StackTwins second(device_, 2, pooled());
  const at::Tensor held = first.expect_plain(0);
  const at::Tensor then = held.clone();
  for (GraphedCallable& callable : first.layers) {
    callable.reset();
  }
  (void)second.expect_plain(0);
  EXPECT_TRUE(at::equal(held, then));
  EXPECT_THROWS(UsageError, "replayed after reset", (void)first.forward(true, rows(0, device_)));
}

TEST_F(GraphPoolTest, WhatIsHeldOfThoseThatAreResetOutlivesTheTurnsOfOthers) {
  const GraphOptions owned = pooled().gradients("**", GradientPolicy::owned);
  StackTwins first(device_, 3, owned);
  StackTwins second(device_, 5, owned);
  std::vector<at::Tensor> held;
  at::Tensor h = rows(0, device_).requires_grad_(true);
  for (const GraphedCallable& callable : first.layers) {
    h = callable({h})[0];
    held.push_back(h.detach());
  }
  h.sum().backward();
  for (const at::Tensor& parameter : first.model->parameters()) {
    held.push_back(parameter.grad());
  }
  std::vector<at::Tensor> then;
  for (const at::Tensor& tensor : held) {
    then.push_back(tensor.clone());
  }
  std::int64_t step = 1;
  const auto expect_held = [&] {
    (void)second.expect_plain(step++);
    for (std::size_t i = 0; i < held.size(); ++i) {
      EXPECT_TRUE(at::equal(held[i], then[i])) << i;
    }
  };
  first.layers[1].reset();
  expect_held();
  first.layers[0].reset();
  first.layers[2].reset();
  expect_held();
}

// A sequence that goes away where the device is full: what is held of it is copied out before others compute there.
TEST_F(GraphPoolTest, WhatIsHeldOfOneThatGoesOnAFullDeviceOutlivesTheTurnsOfOthers) {
  const GraphOptions owned = pooled().gradients("**", GradientPolicy::owned);
  sim::Device& device = sim::Device::get();
  std::int64_t failed = 0;
  for (bool met = true; met; failed += met ? 1 : 0) {
    StackTwins second(device_, 5, owned);
    std::optional<StackTwins> first(std::in_place, device_, 3, owned);
    std::vector<at::Tensor> held{first->forward(true, rows(failed, device_).requires_grad_(true))};
    held[0].sum().backward();
    for (const at::Tensor& parameter : first->model->parameters()) {
      held.push_back(parameter.grad());
    }
    held[0] = held[0].detach();
    std::vector<at::Tensor> then;
    for (const at::Tensor& tensor : held) {
      then.push_back(tensor.cpu());
    }
    const auto expect_held = [&] {
      for (std::size_t i = 0; i < held.size(); ++i) {
        EXPECT_TRUE(at::equal(held[i].cpu(), then[i])) << i << ", allocation " << failed;
      }
    };
    const at::Tensor x = rows(failed + 1, device_).requires_grad_(true);
    device.fail_allocation(failed);
    first.reset();
    met = device.allocation_failed();
    if (met) {
      device.fail_allocation(0);
      EXPECT_THROWS(c10::OutOfMemoryError, "out of memory", (void)second.forward(true, x));
    }
    device.fail_allocation(-1);
    expect_held();
    (void)second.expect_plain(failed);
    expect_held();
  }
  EXPECT_GT(failed, 1) << "an output and gradients";
}

/// Keeps what it made, as attention weights to look at.
class KeepsWhatItMakes : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    made = x.detach().tanh();
    return x * made;
  }
  at::Tensor made;
};

TEST_F(GraphPoolTest, ACallThatKeepsWhatItMakesIsRefused) {
  const auto model = std::make_shared<KeepsWhatItMakes>();
  OffloadEngine engine(*model, Options(device_));
  const auto graph = [&](const GraphOptions& options) {
    return make_graphed_callables(engine, {{"keeps", torch::nn::AnyModule(model)}},
                                  {{rows(0, device_).requires_grad_(true)}}, options);
  };
  EXPECT_THROWS(CaptureError, "it keeps a tensor of 2048 bytes that it made", (void)graph(pooled()));
  EXPECT_THROWS(CaptureError, "Return the tensor as an output. Or", (void)graph(pooled()));
  const auto both = [](KeepsWhatItMakes& keeper, const Tensors& in) {
    const at::Tensor y = keeper.forward(in[0]);
    return Tensors{y, keeper.made};
  };
  EXPECT_THROWS(CaptureError, "Let the member keep nothing, and keep the returned tensor outside of the call. Or",
                (void)make_graphed_callables(engine, {Callable("both", both, model)},
                                             {{rows(0, device_).requires_grad_(true)}}, pooled()));
  EXPECT_TRUE(at::equal(graph(GraphOptions())[0]({rows(1, device_).requires_grad_(true)})[0],
                        model->forward(rows(1, device_))));
}

TEST_F(GraphPoolTest, TheSmallerFitsIntoTheMemoryOfTheLarger) {
  class Wide : public torch::nn::Module {
   public:
    at::Tensor forward(const at::Tensor& x) {
      at::Tensor h = x;
      for (int i = 0; i < 2; ++i) {
        h = h.relu().relu().relu();  // each saves its result, at little cost
      }
      return h;
    }
  };
  constexpr std::int64_t kLargest = 3 << 20;  // elements: segments of their own
  const auto reserved_of = [&](const GraphOptions& options, const std::vector<std::int64_t>& sizes) {
    synchronize(device_);
    release_cached_memory(device_);
    const std::int64_t before = memory_use(device_).reserved;
    const auto model = std::make_shared<Wide>();
    OffloadEngine engine(*model, Options(device_));
    std::vector<GraphedCallable> graphed;
    for (const std::int64_t size : sizes) {
      const at::Tensor sample = at::ones({size}, device_).requires_grad_(true);
      graphed.push_back(
          make_graphed_callables(engine, {{"wide", torch::nn::AnyModule(model)}}, {{sample}}, options)[0]);
    }
    synchronize(device_);
    release_cached_memory(device_);
    std::int64_t own = 0;  // static inputs and gradients of outputs
    for (const std::int64_t size : sizes) {
      own += 2 * size * static_cast<std::int64_t>(sizeof(float));
    }
    return memory_use(device_).reserved - before - own;
  };
  const std::int64_t alone =
      reserved_of(GraphOptions().num_warmup_iters(0).pool(std::make_shared<GraphPool>(device_)), {kLargest});
  const std::int64_t shared = reserved_of(GraphOptions().num_warmup_iters(0).pool(std::make_shared<GraphPool>(device_)),
                                          {kLargest, kLargest, kLargest - (1 << 19)});
  const std::int64_t apart =
      reserved_of(GraphOptions().num_warmup_iters(0), {kLargest, kLargest, kLargest - (1 << 19)});
  EXPECT_EQ(shared, alone);
  EXPECT_GT(apart, 5 * alone / 2);
}

}  // namespace
}  // namespace sidestream::testing_model
