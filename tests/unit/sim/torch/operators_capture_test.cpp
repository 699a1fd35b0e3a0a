#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <sidestream/error.h>
#include <sidestream/testing/schedule.h>
#include <sidestream/testing/simulator.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <memory>

#include "operator_cases.h"
#include "runtime/runtime.h"

namespace {

using sidestream::test::parameter;
using sidestream::test::same_bits;
using sidestream::test::values;
using Tensors = std::vector<at::Tensor>;

/// Captures on a stream of its own; works are issued by LibTorch's operators.
class OperatorCapture : public ::testing::Test {
 protected:
  OperatorCapture()
      : runtime(sidestream::make_runtime(device)), stream(runtime->create_stream()), pool(runtime->create_pool()) {}

  sidestream::Graph capture(const std::function<void()>& body) {
    const sidestream::StreamGuard guard(*runtime, stream.get());
    runtime->begin_capture(stream.get(), pool);
    try {
      body();
    } catch (...) {
      runtime->abandon_capture(stream.get());
      throw;
    }
    return runtime->end_capture(stream.get());
  }

  void launch(const sidestream::Graph& graph) {
    runtime->launch(graph, stream.get());
    runtime->synchronize(stream.get());
  }

  /// `body` in a capture is an error, and the stream is as before.
  void expect_refused(const std::function<void()>& body) {
    EXPECT_THROW((void)capture(body), sidestream::CaptureError);
    EXPECT_EQ(runtime->capture_status(stream.get()), sidestream::CaptureStatus::none);
    const at::Tensor x = at::ones({4}, on());
    at::Tensor y;
    const sidestream::Graph graph = capture([&] { y = x * 3; });
    launch(graph);
    EXPECT_EQ(y.sum().item<double>(), 12);
  }

  at::TensorOptions on() const { return at::TensorOptions().device(device); }

  c10::Device device = sidestream::test::sim();
  std::shared_ptr<sidestream::Runtime> runtime;
  sidestream::OwnedStream stream;
  sidestream::MemoryPool pool;
};

/// Weights, static input and output gradient of a block on one device.
struct Block {
  explicit Block(c10::Device device) {
    at::manual_seed(1);
    weights = {parameter({96, 32}, device), parameter({32, 32}, device), parameter({64, 32}, device),
               parameter({32, 64}, device), parameter({32}, device),     parameter({32}, device)};
    x = parameter({2, 16, 32}, device);
    grad = values({2, 16, 32}, device);
  }

  /// Output, then the gradients of the input and the weights.
  Tensors run() const {
    const at::Tensor qkv = at::linear(at::layer_norm(x, {32}, weights[4], weights[5]), weights[0])
                               .view({2, 16, 3, 4, 8})
                               .permute({2, 0, 3, 1, 4});
    const at::Tensor mixed = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, 0.0, true);
    const at::Tensor y = x + at::dropout(at::linear(mixed.transpose(1, 2).reshape({2, 16, 32}), weights[1]), 0.2, true);
    const at::Tensor z =
        y + at::dropout(at::linear(at::silu(at::linear(at::rms_norm(y, {32}, weights[4]), weights[2])), weights[3]),
                        0.2, true);
    Tensors inputs = weights;
    inputs.push_back(x);
    Tensors results = torch::autograd::grad({z}, inputs, {grad});
    results.push_back(z.detach());
    return results;
  }

  void set(std::uint64_t seed) {
    at::manual_seed(seed);
    const at::Tensor new_x = at::randn(x.sizes()), new_grad = at::randn(x.sizes());
    x.detach().copy_(new_x);
    grad.copy_(new_grad);
    at::manual_seed(seed);
  }

  Tensors weights;
  at::Tensor x, grad;
};

TEST_F(OperatorCapture, BlockWithDropoutReplaysTheBitsOfTheCpu) {
  Block cpu(at::kCPU), sim(device);
  Tensors results;
  const sidestream::Graph graph = capture([&] { results = sim.run(); });
  for (std::uint64_t i = 0; i < 20; ++i) {
    cpu.set(i);
    const Tensors expected = cpu.run();
    sim.set(i);
    launch(graph);
    for (std::size_t k = 0; k < expected.size(); ++k) {
      ASSERT_TRUE(same_bits(expected[k], results[k])) << "launch " << i << ", result " << k;
    }
  }
}

TEST_F(OperatorCapture, LowerPrecisionAndConvolutionReplayTheBitsOfTheCpu) {
  struct Parts {
    explicit Parts(c10::Device on) {
      at::manual_seed(2);
      x = values({2, 4, 16, 16}, on);
      weight = parameter({16, 16}, on);
      filter = parameter({4, 4, 3, 3}, on);
    }
    Tensors run() const {
      const at::Tensor lower = at::linear(x.to(at::kBFloat16), weight.to(at::kBFloat16));
      const at::Tensor mixed = at::scaled_dot_product_attention(lower, lower, lower, {}, 0.0, true).to(at::kFloat);
      const at::Tensor y = at::conv2d(mixed, filter, {}, 1, 1);
      Tensors results = torch::autograd::grad({y.square().sum()}, {weight, filter});
      results.push_back(y.detach());
      return results;
    }
    at::Tensor x, weight, filter;
  };
  const Parts cpu(at::kCPU), sim(device);
  (void)sim.run();  // kernels that keep prepared weights do so in their first run
  Tensors results;
  const sidestream::Graph graph = capture([&] { results = sim.run(); });
  for (int i = 0; i < 5; ++i) {
    const at::Tensor next = at::randn(cpu.x.sizes());
    cpu.x.copy_(next);
    sim.x.copy_(next);
    launch(graph);
    const Tensors expected = cpu.run();
    for (std::size_t k = 0; k < expected.size(); ++k) {
      ASSERT_TRUE(same_bits(expected[k], results[k])) << "launch " << i << ", result " << k;
    }
  }
}

TEST_F(OperatorCapture, EachLaunchDrawsOnFromTheDefaultGenerator) {
  const at::Tensor x = at::ones({100}, on());
  at::Tensor first, second;
  at::manual_seed(5);
  const sidestream::Graph graph = capture([&] {
    first = at::dropout(x, 0.5, true);
    second = at::rand({7}, on());
  });
  at::manual_seed(5);
  Tensors expected;
  for (int i = 0; i < 3; ++i) {
    expected.push_back(at::dropout(at::ones({100}), 0.5, true));
    expected.push_back(at::rand({7}));
  }
  for (std::size_t i = 0; i < 3; ++i) {
    launch(graph);
    EXPECT_TRUE(same_bits(expected[2 * i], first)) << i;
    EXPECT_TRUE(same_bits(expected[2 * i + 1], second)) << i;
  }
}

TEST_F(OperatorCapture, WhatOperatorsWriteInPlaceIsPutBackAndWrittenByTheLaunch) {
  const at::Tensor x = values({4, 3, 8}, device), sum = at::zeros({3}, on());
  const at::Tensor mean = at::zeros({3}, on()), var = at::ones({3}, on());
  const at::Tensor grown = at::empty({0}, on());
  const sidestream::Graph graph = capture([&] {
    (void)at::batch_norm(x, {}, {}, mean, var, true, 0.1, 1e-5, false);  // its schema does not say that it writes these
    sum.add_(1);
    at::add_out(const_cast<at::Tensor&>(grown), mean, sum);
  });
  EXPECT_TRUE(same_bits(at::zeros({3}), mean));
  EXPECT_TRUE(same_bits(at::ones({3}), var));
  EXPECT_TRUE(same_bits(at::zeros({3}), sum));
  const at::Tensor cpu_mean = at::zeros({3}), cpu_var = at::ones({3});
  for (int i = 1; i <= 3; ++i) {
    launch(graph);
    (void)at::batch_norm(x.cpu(), {}, {}, cpu_mean, cpu_var, true, 0.1, 1e-5, false);
    EXPECT_TRUE(same_bits(cpu_mean, mean));
    EXPECT_TRUE(same_bits(cpu_var, var));
    EXPECT_TRUE(same_bits(at::full({3}, i, at::kFloat), sum));
    EXPECT_TRUE(same_bits(cpu_mean + i, grown));
  }
}

TEST_F(OperatorCapture, PinnedCopiesBelongToTheGraph) {
  const at::Tensor from = at::arange(6, at::kFloat).pin_memory(), to = at::zeros({6}).pin_memory();
  ASSERT_TRUE(from.is_pinned());
  ASSERT_FALSE(at::ones({2}).is_pinned());
  const at::Tensor x = at::empty({6}, on());
  const sidestream::Graph graph = capture([&] {
    x.copy_(from, true);
    to.copy_(x * 2, true);
  });
  for (int i = 0; i < 3; ++i) {
    from.add_(1);
    launch(graph);
    EXPECT_TRUE(same_bits(from * 2, to));
  }
}

TEST_F(OperatorCapture, RefusesWhatTheHostMustWaitFor) {
  const at::Tensor x = values({8}, device), index = at::arange(3).to(device), host = at::empty({8});
  expect_refused([&] { (void)x.sum().item<double>(); });
  expect_refused([&] { (void)at::nonzero(x); });
  expect_refused([&] { (void)at::index(x, {x > 0}); });
  expect_refused([&] { (void)at::equal(x, values({8}, device)); });
  expect_refused([&] { (void)at::repeat_interleave(index); });
  expect_refused([&] { (void)x.cpu(); });
  expect_refused([&] { host.copy_(x, true); });
  expect_refused([&] { x.copy_(host); });
}

TEST_F(OperatorCapture, TellsThatATensorEqualsItselfWithoutALookAtIt) {
  const at::Tensor x = values({8}, device);
  bool equal = false;
  launch(capture([&] { equal = at::equal(x, x.view({8})); }));
  EXPECT_TRUE(equal);
}

TEST_F(OperatorCapture, ComparesSizesWithoutALookAtTheElements) {
  const at::Tensor x = values({8}, device), longer = values({9}, device), none = at::empty({0}, on());
  bool longer_is_equal = true, none_is_equal = false;
  launch(capture([&] {
    longer_is_equal = at::equal(x, longer);
    none_is_equal = at::equal(none, none.clone());
  }));
  EXPECT_FALSE(longer_is_equal);
  EXPECT_TRUE(none_is_equal);
}

TEST_F(OperatorCapture, RefusesAGeneratorThatLaunchesWouldNotMoveOn) {
  at::Generator generator = at::globalContext().getAcceleratorHooksInterface().getNewGenerator();
  const at::Tensor x = at::empty({8}, on());
  EXPECT_THROW((void)capture([&] { x.normal_(0, 1, generator); }), sidestream::UsageError);
}

struct DrawingCase {
  const char* name;
  std::function<at::Tensor(const at::Tensor& x)> draw;
};

class OperatorDraws : public OperatorCapture, public ::testing::WithParamInterface<DrawingCase> {
 protected:
  ~OperatorDraws() override { sidestream::set_schedule(device, sidestream::Schedule()); }

  at::Tensor generator_state() const { return at::globalContext().defaultGenerator(device).get_state(); }
};

// How much they draw depends on data, or on a normal sample that earlier draws left over. Dropout keeps that sample.
INSTANTIATE_TEST_SUITE_P(
    Operators, OperatorDraws,
    ::testing::Values(
        DrawingCase{"poisson", [](const at::Tensor& x) { return at::poisson(x.abs() * 3); }},
        DrawingCase{"rrelu", [](const at::Tensor& x) { return at::rrelu(x, 0.1, 0.3, true); }},
        DrawingCase{"rrelu_in_place",
                    [](const at::Tensor& x) {
                      at::Tensor y = x * 1;
                      return at::rrelu_(y, 0.1, 0.3, true);
                    }},
        DrawingCase{"gamma", [](const at::Tensor& x) { return at::_standard_gamma(x.abs() + 0.1); }},
        DrawingCase{"binomial", [](const at::Tensor& x) { return at::binomial(at::full_like(x, 30), x.sigmoid()); }},
        DrawingCase{"dirichlet", [](const at::Tensor& x) { return at::_sample_dirichlet(x.abs() + 0.1); }},
        DrawingCase{"normal", [](const at::Tensor& x) { return x + at::randn_like(x); }},
        DrawingCase{"normal_with_mean", [](const at::Tensor& x) { return at::normal(x, 0.5); }},
        DrawingCase{"log_normal", [](const at::Tensor& x) { return at::empty_like(x).log_normal_(); }},
        DrawingCase{"dropout", [](const at::Tensor& x) { return at::dropout(x, 0.5, true); }}),
    [](const auto& info) { return info.param.name; });

TEST_P(OperatorDraws, MoveTheGeneratorOnInAReplayAsInAPlainCall) {
  const sidestream::StreamGuard guard(*runtime, stream.get());
  const at::Tensor x = at::zeros({7}, on());
  at::Tensor y;
  const sidestream::Graph graph = capture([&] { y = GetParam().draw(x) + GetParam().draw(x + 1); });
  for (const char* schedule : {"early", "late"}) {
    SCOPED_TRACE(schedule);
    sidestream::set_schedule(device, sidestream::Schedule::parse(schedule));
    const auto train = [&](bool graphed) {
      at::manual_seed(12);
      Tensors results;
      for (int step = 0; step < 4; ++step) {
        x.copy_(at::arange(7) * 1.5 - 2 * step);
        if (graphed) {
          launch(graph);
          results.push_back(y.clone());
        } else {
          results.push_back(GetParam().draw(x) + GetParam().draw(x + 1));
        }
        results.push_back(at::randn({1}, on()));
        results.push_back(generator_state());
      }
      return results;
    };
    const Tensors expected = train(false), replayed = train(true);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(same_bits(expected[i], replayed[i])) << "result " << i;
    }
  }
}

}  // namespace
