#include "sidestream/graphed_callable.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/utils.h>

#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "unit/graphs/block_model.h"
#include "unit/graphs/layer_stack.h"

namespace sidestream {
namespace {

using testing_model::gradients;
using testing_model::graph_stack;
using testing_model::layer_stack;
using testing_model::Mlp;
using testing_model::rows;
using testing_model::run_stack;
using testing_model::same;

constexpr std::int64_t kSteps = 5;

at::Tensor on_cpu(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.detach().cpu().clone() : at::empty({0});
}

/// The reference systems' form of trainer: what it adds to a plain one is an engine, the callables and their samples.
struct StackTrainer {
  explicit StackTrainer(c10::Device on, std::int64_t layers = 4, const Mlp::Extras& extras = {})
      : device(on), model(layer_stack(layers, on, extras)) {}

  void graph(const Options& engine_options, const GraphOptions& options, bool linked = true) {
    engine = std::make_unique<OffloadEngine>(*model, engine_options);
    layers = graph_stack(*engine, model, device, options, linked);
  }

  /// Gradients of the input and of every parameter, and the output.
  std::vector<at::Tensor> step(std::int64_t s) {
    model->zero_grad();
    const at::Tensor x = rows(s, device).requires_grad_(true);
    const at::Tensor y = layers.empty() ? model->forward(x) : run_stack(layers, x);
    (y * rows(s, device, 1)).sum().backward();
    std::vector<at::Tensor> result = gradients(*model);
    result.push_back(on_cpu(x.grad()));
    result.push_back(on_cpu(y));
    testing_model::descend(*model);
    return result;
  }

  c10::Device device;
  torch::nn::Sequential model;
  std::unique_ptr<OffloadEngine> engine;
  std::vector<GraphedCallable> layers;
};

class GraphedCallableTest : public testing::Test {
 protected:
  [[nodiscard]] Options offload_all() const { return Options(device_).offload("layers.*.*").min_bytes(1024); }
  [[nodiscard]] Options no_offload() const { return Options(device_); }

  void expect_plain(StackTrainer& graphed, StackTrainer& plain) {
    for (std::int64_t s = 0; s < kSteps; ++s) {
      EXPECT_TRUE(same(graphed.step(s), plain.step(s))) << "step " << s;
    }
  }

  c10::Device device_ = find_device("sim");
};

struct Form {
  std::int64_t side_streams;
  bool offload;
  bool linked;
};

class GraphedStackTest : public GraphedCallableTest, public testing::WithParamInterface<Form> {};

TEST_P(GraphedStackTest, TrainsAsThePlainStack) {
  StackTrainer plain(device_);
  StackTrainer graphed(device_);
  graphed.graph(GetParam().offload ? offload_all() : no_offload(), GraphOptions().side_streams(GetParam().side_streams),
                GetParam().linked);
  expect_plain(graphed, plain);
}

TEST_P(GraphedStackTest, AddsIntoGradientsAsThePlainStack) {
  StackTrainer plain(device_);
  StackTrainer graphed(device_);
  graphed.graph(GetParam().offload ? offload_all() : no_offload(),
                GraphOptions().side_streams(GetParam().side_streams).accumulate_in_graph(true), GetParam().linked);
  expect_plain(graphed, plain);
}

TEST_P(GraphedStackTest, RunsBackwardOnWhatIsLeftOfTheChain) {
  StackTrainer plain(device_);
  StackTrainer graphed(device_);
  graphed.graph(GetParam().offload ? offload_all() : no_offload(), GraphOptions().side_streams(GetParam().side_streams),
                GetParam().linked);
  for (std::int64_t s = 0; s < 3; ++s) {
    const at::Tensor x = rows(s, device_).requires_grad_(true);
    const at::Tensor x_plain = rows(s, device_).requires_grad_(true);
    graphed.layers[1]({graphed.layers[0]({x})[0]})[0].sum().backward();
    auto plain_layer = plain.model->begin();
    at::Tensor h = plain_layer->forward(x_plain);
    (++plain_layer)->forward(h).sum().backward();
    EXPECT_TRUE(at::equal(on_cpu(x.grad()), on_cpu(x_plain.grad())));
    EXPECT_TRUE(same(gradients(*graphed.model), gradients(*plain.model)));
    EXPECT_TRUE(same(graphed.step(s), plain.step(s))) << "the whole chain after a part of it";
  }
}

TEST_P(GraphedStackTest, OutputsMayBeUsedTwice) {
  StackTrainer plain(device_);
  StackTrainer graphed(device_);
  graphed.graph(GetParam().offload ? offload_all() : no_offload(), GraphOptions().side_streams(GetParam().side_streams),
                GetParam().linked);
  const auto losses = [&](const std::function<at::Tensor(std::size_t, const at::Tensor&)>& layer) {
    const at::Tensor x = rows(3, device_).requires_grad_(true);
    std::vector<at::Tensor> h{x};
    at::Tensor loss;
    for (std::size_t i = 0; i < 4; ++i) {
      h.push_back(layer(i, h.back()));
      h.back().retain_grad();
      const at::Tensor term = (h.back() * rows(static_cast<std::int64_t>(i), device_)).sum();
      loss = loss.defined() ? loss + term : term;
    }
    std::vector<at::Tensor> result;
    for (const at::Tensor& grad : torch::autograd::grad({loss}, {h[0], h[1], h[2], h[3]}, {}, /*retain_graph=*/false)) {
      result.push_back(on_cpu(grad));
    }
    return result;
  };
  const auto mine = losses([&](std::size_t i, const at::Tensor& h) { return graphed.layers[i]({h})[0]; });
  const auto theirs = losses([&](std::size_t i, const at::Tensor& h) {
    return (plain.model->begin() + static_cast<std::ptrdiff_t>(i))->forward(h);
  });
  for (std::size_t i = 0; i < theirs.size(); ++i) {
    EXPECT_TRUE(at::equal(mine[i], theirs[i])) << "gradient of h" << i;
  }
}

TEST_P(GraphedStackTest, GradientsOfInnerOutputsStay) {
  StackTrainer plain(device_);
  StackTrainer graphed(device_);
  graphed.graph(GetParam().offload ? offload_all() : no_offload(), GraphOptions().side_streams(GetParam().side_streams),
                GetParam().linked);
  const auto inner = [&](const std::function<at::Tensor(std::size_t, const at::Tensor&)>& layer) {
    std::vector<at::Tensor> h{rows(3, device_).requires_grad_(true)};
    for (std::size_t i = 0; i < 4; ++i) {
      h.push_back(layer(i, h.back()));
    }
    std::vector<at::Tensor> result;
    for (const at::Tensor& grad : torch::autograd::grad({h[4].sum()}, {h[0], h[1], h[2], h[3]})) {
      result.push_back(on_cpu(grad));
    }
    return result;
  };
  const auto mine = inner([&](std::size_t i, const at::Tensor& h) { return graphed.layers[i]({h})[0]; });
  const auto theirs = inner([&](std::size_t i, const at::Tensor& h) {
    return (plain.model->begin() + static_cast<std::ptrdiff_t>(i))->forward(h);
  });
  for (std::size_t i = 0; i < theirs.size(); ++i) {
    EXPECT_TRUE(at::equal(mine[i], theirs[i])) << "gradient of h" << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, GraphedStackTest,
                         testing::Values(Form{1, true, true}, Form{2, true, true}, Form{3, true, true},
                                         Form{1, true, false}, Form{2, true, false}, Form{2, false, true},
                                         Form{2, false, false}),
                         [](const auto& info) {
                           return "K" + std::to_string(info.param.side_streams) +
                                  (info.param.offload ? "Offload" : "") + (info.param.linked ? "Linked" : "");
                         });

TEST_F(GraphedCallableTest, OffloadsInsideSteps) {
  StackTrainer plain(device_);
  StackTrainer graphed(device_);
  graphed.graph(offload_all(), GraphOptions());
  for (std::int64_t s = 0; s < kSteps; ++s) {
    const auto step = graphed.engine->step();
    EXPECT_TRUE(same(graphed.step(s), plain.step(s))) << "step " << s;
  }
  const Report report = graphed.engine->report();
  EXPECT_EQ(report.captures, 8);
  EXPECT_EQ(report.replays, 8);
  EXPECT_GT(report.offloaded_bytes, 0);
  EXPECT_EQ(report.offloaded_bytes, report.reloaded_bytes);
  EXPECT_EQ(report.inline_reloads, 0);
}

TEST_F(GraphedCallableTest, WarmUpRunsBetweenItsHooks) {
  std::vector<std::string> log;
  const Callable callable("double", [&](const Tensors& in) {
    log.push_back("run");
    return Tensors{in[0] * 2};
  });
  StackTrainer trainer(device_, 1);
  OffloadEngine engine(*trainer.model, no_offload());
  for (const std::int64_t iterations : {0, 1, 3}) {
    log.clear();
    const auto graphed = make_graphed_callables(engine, {callable}, {{rows(0, device_).requires_grad_(true)}},
                                                GraphOptions()
                                                    .num_warmup_iters(iterations)
                                                    .pre_warmup_hook([&] { log.push_back("pre"); })
                                                    .post_warmup_hook([&] { log.push_back("post"); }));
    std::vector<std::string> expected{"pre", "run"};
    expected.insert(expected.end(), static_cast<std::size_t>(iterations), "run");
    expected.insert(expected.end(), {"post", "run"});
    EXPECT_EQ(log, expected) << "the sizing pass, " << iterations << " more, and the capture";
    (void)graphed[0]({rows(1, device_).requires_grad_(true)});
    EXPECT_EQ(log, expected) << "a replay runs no user code";
  }
}

TEST_F(GraphedCallableTest, CaptureLeavesGradientsBuffersAndRandomStateAsTheyWere) {
  const Mlp::Extras extras{0.3, true};
  StackTrainer trainer(device_, 3, extras);
  trainer.step(0);
  (trainer.model->forward(rows(1, device_))).sum().backward();
  const auto state = [&] {
    std::vector<at::Tensor> tensors = gradients(*trainer.model);
    for (const at::Tensor& tensor : trainer.model->buffers()) {
      tensors.push_back(on_cpu(tensor));
    }
    for (const at::Tensor& tensor : trainer.model->parameters()) {
      tensors.push_back(on_cpu(tensor));
    }
    return tensors;
  };
  const auto before = state();
  torch::manual_seed(3);
  const at::Tensor drawn = on_cpu(at::rand({8}, at::TensorOptions().device(device_)));
  torch::manual_seed(3);
  trainer.graph(offload_all(), GraphOptions());
  EXPECT_TRUE(at::equal(on_cpu(at::rand({8}, at::TensorOptions().device(device_))), drawn));
  EXPECT_TRUE(same(state(), before));
}

TEST_F(GraphedCallableTest, DropoutAndRunningStatisticsAreThoseOfThePlainStack) {
  const Mlp::Extras extras{0.3, true};
  StackTrainer plain(device_, 3, extras);
  StackTrainer graphed(device_, 3, extras);
  graphed.graph(offload_all(), GraphOptions());
  torch::manual_seed(4);
  std::vector<std::vector<at::Tensor>> theirs;
  for (std::int64_t s = 0; s < kSteps; ++s) {
    theirs.push_back(plain.step(s));
  }
  torch::manual_seed(4);
  for (std::int64_t s = 0; s < kSteps; ++s) {
    EXPECT_TRUE(same(graphed.step(s), theirs[static_cast<std::size_t>(s)])) << "step " << s;
  }
  const auto mine = graphed.model->buffers();
  const auto other = plain.model->buffers();
  ASSERT_EQ(mine.size(), 6U);
  for (std::size_t i = 0; i < mine.size(); ++i) {
    EXPECT_TRUE(at::equal(on_cpu(mine[i]), on_cpu(other[i])));
  }
}

TEST_F(GraphedCallableTest, TakesAndGivesSeveralTensorsSomeUndefined) {
  StackTrainer trainer(device_, 1);
  OffloadEngine engine(*trainer.model, no_offload());
  const at::Tensor weight = rows(7, device_).requires_grad_(true);
  const TensorFunction function = [weight](const Tensors& in) {
    const at::Tensor sum = in[0] * weight + in[1];
    return Tensors{sum, in[2].defined() ? in[2] : at::Tensor(), (in[0] * sum).tanh(), in[3].to(at::kFloat) * 2};
  };
  const auto inputs = [&](std::int64_t s) {
    return Tensors{rows(s, device_).requires_grad_(true), rows(s, device_, 2), at::Tensor(),
                   at::full({4}, s, at::TensorOptions().device(device_).dtype(at::kLong))};
  };
  const Tensors sample = inputs(0);
  const auto graphed = make_graphed_callables(engine, {Callable("several", function)},
                                              {std::vector<Sample>(sample.begin(), sample.end())});
  for (std::int64_t s = 1; s < kSteps; ++s) {
    const auto run = [&](const std::function<Tensors(const Tensors&)>& f) {
      const Tensors in = inputs(s);
      const Tensors out = f(in);
      EXPECT_EQ(out.size(), 4U);
      EXPECT_FALSE(out[1].defined());
      EXPECT_FALSE(out[3].requires_grad());
      weight.mutable_grad() = at::Tensor();
      (s % 2 == 0 ? out[0].sum() + (out[2] * out[2]).sum() : out[2].sum()).backward();
      return std::vector<at::Tensor>{on_cpu(out[0]),        on_cpu(out[2]),       on_cpu(out[3]),
                                     on_cpu(weight.grad()), on_cpu(in[0].grad()), on_cpu(in[1].grad())};
    };
    const auto mine = run([&](const Tensors& in) { return graphed[0](in); });
    const auto theirs = run(function);
    for (std::size_t i = 0; i < theirs.size(); ++i) {
      EXPECT_TRUE(at::equal(mine[i], theirs[i])) << "tensor " << i << ", step " << s;
    }
  }
}

TEST_F(GraphedCallableTest, AnUnusedInputNeedsPermission) {
  StackTrainer trainer(device_, 1);
  OffloadEngine engine(*trainer.model, no_offload());
  const std::vector<Callable> callables{Callable("first", [](const Tensors& in) { return Tensors{in[0] * in[0]}; })};
  const std::vector<std::vector<Sample>> samples{
      {rows(0, device_).requires_grad_(true), rows(1, device_).requires_grad_(true)}};
  EXPECT_THROWS(UsageError, "allow_unused_input", (void)make_graphed_callables(engine, callables, samples));
  const auto graphed = make_graphed_callables(engine, callables, samples, GraphOptions().allow_unused_input(true));
  const at::Tensor a = rows(2, device_).requires_grad_(true);
  const at::Tensor b = rows(3, device_).requires_grad_(true);
  graphed[0]({a, b})[0].sum().backward();
  EXPECT_TRUE(at::equal(on_cpu(a.grad()), on_cpu(a * 2)));
  EXPECT_FALSE(b.grad().defined());
}

TEST_F(GraphedCallableTest, RunsEagerlyUnderNoGradAndInEval) {
  const Mlp::Extras extras{0.5, false};
  StackTrainer plain(device_, 2, extras);
  StackTrainer graphed(device_, 2, extras);
  graphed.graph(offload_all(), GraphOptions());
  const at::Tensor other_shape = rows(0, device_).slice(0, 0, 5);
  {
    const at::NoGradGuard no_grad;
    torch::manual_seed(8);
    const at::Tensor expected = plain.model->forward(other_shape);
    torch::manual_seed(8);
    const at::Tensor y = run_stack(graphed.layers, other_shape);
    EXPECT_FALSE(y.requires_grad());
    EXPECT_TRUE(at::equal(on_cpu(y), on_cpu(expected))) << "a shape that was not captured is no matter when eager";
  }
  plain.model->eval();
  graphed.model->eval();
  EXPECT_TRUE(same(graphed.step(0), plain.step(0)));
  plain.model->train();
  graphed.model->train();
  torch::manual_seed(9);
  const auto theirs = plain.step(1);
  torch::manual_seed(9);
  EXPECT_TRUE(same(graphed.step(1), theirs));
}

TEST_F(GraphedCallableTest, ADroppedForwardLetsTheNextRun) {
  StackTrainer plain(device_);
  StackTrainer graphed(device_);
  graphed.graph(offload_all(), GraphOptions());
  for (std::int64_t s = 0; s < 3; ++s) {
    (void)run_stack(graphed.layers, rows(50 + s, device_).requires_grad_(true));
    EXPECT_TRUE(same(graphed.step(s), plain.step(s))) << "step " << s;
  }
}

TEST_F(GraphedCallableTest, TwoBackwardsOfARetainedGraph) {
  StackTrainer plain(device_);
  StackTrainer graphed(device_);
  graphed.graph(offload_all(), GraphOptions().retain_graph_in_backward(true));
  const auto twice = [&](torch::nn::Sequential& model, const std::function<at::Tensor(const at::Tensor&)>& run,
                         std::int64_t s) {
    model->zero_grad();
    const at::Tensor x = rows(s, device_).requires_grad_(true);
    const at::Tensor loss = run(x).square().mean();
    loss.backward({}, /*retain_graph=*/true);
    std::vector<at::Tensor> result = gradients(*model);
    loss.backward();
    for (const at::Tensor& grad : gradients(*model)) {
      result.push_back(grad);
    }
    result.push_back(on_cpu(x.grad()));
    testing_model::descend(*model);
    return result;
  };
  for (std::int64_t s = 0; s < 3; ++s) {
    EXPECT_TRUE(same(twice(
                         graphed.model, [&](const at::Tensor& x) { return run_stack(graphed.layers, x); }, s),
                     twice(
                         plain.model, [&](const at::Tensor& x) { return plain.model->forward(x); }, s)))
        << "step " << s;
  }
}

// A hook may keep what it is given: the graph's own memory would be overwritten by a later replay.
TEST_F(GraphedCallableTest, GradientsThatHooksKeepAreTheCallersOwn) {
  StackTrainer graphed(device_);
  graphed.graph(offload_all(), GraphOptions());
  std::vector<at::Tensor> kept;
  std::vector<at::Tensor> then;
  const auto keep = [&](const at::Tensor& grad) {
    kept.push_back(grad);
    then.push_back(on_cpu(grad));
  };
  const at::Tensor x = rows(0, device_).requires_grad_(true);
  x.register_hook(keep);
  const auto hook = graphed.model->parameters()[0].register_hook(keep);
  (run_stack(graphed.layers, x) * rows(0, device_, 1)).sum().backward();
  graphed.model->parameters()[0].remove_hook(hook);
  ASSERT_EQ(kept.size(), 2U);
  (void)graphed.step(1);
  EXPECT_TRUE(at::equal(on_cpu(kept[0]), then[0]));
  EXPECT_TRUE(at::equal(on_cpu(kept[1]), then[1]));
}

// Beside the chain's own nodes a linked output may have others: what they are given stays theirs.
TEST_F(GraphedCallableTest, AViewBetweenLinkedCallsKeepsItsGradient) {
  StackTrainer graphed(device_);
  graphed.graph(offload_all(), GraphOptions());
  at::Tensor kept;
  at::Tensor then;
  const at::Tensor x = rows(0, device_).requires_grad_(true);
  at::Tensor h = x;
  for (std::size_t i = 0; i < graphed.layers.size(); ++i) {
    h = graphed.layers[i]({h})[0];
    if (i == 1) {
      h = h.view_as(h);
      h.register_hook([&](const at::Tensor& grad) {
        kept = grad;
        then = on_cpu(grad);
      });
    }
  }
  (h * rows(0, device_, 1)).sum().backward();
  ASSERT_TRUE(kept.defined());
  EXPECT_TRUE(at::equal(on_cpu(kept), then)) << "a later graph of the same backward wrote into it";
  (void)graphed.step(1);
  EXPECT_TRUE(at::equal(on_cpu(kept), then)) << "a later replay wrote into it";
}

// The first branch's gradient waits, as the graph gave it, while the other branches' graphs run.
TEST_F(GraphedCallableTest, GradientsOfBranchesMeet) {
  constexpr std::int64_t kBranches = 4;
  OffloadEngine engine(*layer_stack(1, device_), offload_all());
  std::vector<at::Tensor> weights;
  std::vector<Callable> callables;
  std::vector<std::vector<Sample>> samples;
  for (std::int64_t i = 0; i < kBranches; ++i) {
    weights.push_back(rows(i, device_, 5).slice(0, 0, 1).clone().requires_grad_(true));
    callables.emplace_back("branch." + std::to_string(i), [weight = weights.back()](const Tensors& x) {
      return Tensors{x[0].mul(weight).tanh().exp()};  // reads x once: one gradient comes back
    });
    samples.push_back({Sample(rows(0, device_).requires_grad_(true))});
  }
  auto branches = make_graphed_callables(engine, callables, samples, GraphOptions());
  const auto gradient = [&](bool graphed, std::int64_t s) {
    const at::Tensor x = rows(s, device_).requires_grad_(true);
    const at::Tensor shared = x.mul(0.5);
    at::Tensor sum;
    for (std::size_t i = 0; i < kBranches; ++i) {
      const at::Tensor y = graphed ? branches[i]({shared})[0] : callables[i].function()({shared})[0];
      sum = sum.defined() ? sum + y : y;
    }
    (sum * rows(s, device_, 1)).sum().backward();
    return on_cpu(x.grad());
  };
  for (std::int64_t s = 0; s < kSteps; ++s) {
    EXPECT_TRUE(at::equal(gradient(true, s), gradient(false, s))) << "step " << s;
  }
}

}  // namespace
}  // namespace sidestream
