#include "sidestream/graphed_callable.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/utils.h>

#include "expect_throws.h"
#include "models/block_model.h"
#include "models/layer_stack.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

using testing_model::gradients;
using testing_model::graph_stack;
using testing_model::layer_stack;
using testing_model::Mlp;
using testing_model::rows;
using testing_model::run_stack;
using testing_model::same;
using testing_model::StepTensors;
using testing_model::train_step;

/// The reference systems' form of trainer: what it adds to a plain one is an engine, the callables and their samples.
struct StackTrainer {
  explicit StackTrainer(c10::Device on, std::int64_t layers = 4, const Mlp::Extras& extras = {})
      : device(on), model(layer_stack(layers, on, extras)) {}

  void graph(const Options& engine_options, const GraphOptions& options, bool linked = true) {
    engine = std::make_unique<OffloadEngine>(*model, engine_options);
    layers = graph_stack(*engine, model, device, options, linked);
  }

  /// Gradients of the input and of every parameter, buffers, and the output.
  StepTensors step(std::int64_t s) {
    const at::Tensor x = rows(s, device).requires_grad_(true);
    at::Tensor y;
    StepTensors result = train_step(*model, nullptr, [&] {
      y = layers.empty() ? model->forward(x) : run_stack(layers, x);
      (y * rows(s, device, 1)).sum().backward();
    });
    result.emplace_back("gradient of the input", x.grad());
    result.emplace_back("output", y);
    return result;
  }

  c10::Device device;
  torch::nn::Sequential model;
  std::unique_ptr<OffloadEngine> engine;
  std::vector<GraphedCallable> layers;
};

class GraphedCallableTest : public testing::Test {
 protected:
  static constexpr std::int64_t kSteps = 5;

  [[nodiscard]] Options offload_all() const { return Options(device_).offload("layers.*.*").min_bytes(1024); }
  [[nodiscard]] Options no_offload() const { return Options(device_); }

  static void expect_plain(StackTrainer& graphed, StackTrainer& plain, std::int64_t first = 0,
                           std::int64_t last = kSteps) {
    testing_model::expect_plain(
        first, last, [&](std::int64_t s) { return graphed.step(s); }, [&](std::int64_t s) { return plain.step(s); });
  }

  c10::Device device_ = find_device("sim");
};

struct Form {
  std::int64_t side_streams;
  bool offload;
  bool linked;
};

class GraphedStackTest : public GraphedCallableTest, public testing::WithParamInterface<Form> {
 protected:
  void graph(const GraphOptions& options = {}) {
    graphed_.graph(GetParam().offload ? offload_all() : no_offload(),
                   GraphOptions(options).side_streams(GetParam().side_streams), GetParam().linked);
  }

  /// The gradients that a sum of `term(layer, its output)` gives the stack's input and inner outputs, graphed and plain.
  void expect_plain_inner_gradients(const std::function<at::Tensor(std::int64_t, const at::Tensor&)>& term) {
    const auto inner = [&](const std::function<at::Tensor(std::int64_t, const at::Tensor&)>& layer) {
      std::vector<at::Tensor> h{rows(3, device_).requires_grad_(true)};
      at::Tensor loss;
      for (std::int64_t i = 0; i < 4; ++i) {
        h.push_back(layer(i, h.back()));
        const at::Tensor more = term(i, h.back());
        loss = loss.defined() && more.defined() ? loss + more : more;
      }
      StepTensors result;
      for (const at::Tensor& grad : torch::autograd::grad({loss}, {h[0], h[1], h[2], h[3]})) {
        result.emplace_back("gradient of h" + std::to_string(result.size()), grad);
      }
      return result;
    };
    const auto mine = inner([&](std::int64_t i, const at::Tensor& h) { return graphed_.layers[i]({h})[0]; });
    EXPECT_TRUE(same(
        mine, inner([&](std::int64_t i, const at::Tensor& h) { return (plain_.model->begin() + i)->forward(h); })));
  }

  StackTrainer plain_{device_};
  StackTrainer graphed_{device_};
};

TEST_P(GraphedStackTest, TrainsAsThePlainStack) {
  graph();
  expect_plain(graphed_, plain_);
}

TEST_P(GraphedStackTest, AddsIntoGradientsAsThePlainStack) {
  graph(GraphOptions().gradients("**", GradientPolicy::accumulated));
  expect_plain(graphed_, plain_);
}

TEST_P(GraphedStackTest, RunsBackwardOnWhatIsLeftOfTheSequence) {
  graph();
  for (std::int64_t s = 0; s < 3; ++s) {
    const at::Tensor x = rows(s, device_).requires_grad_(true);
    const at::Tensor x_plain = rows(s, device_).requires_grad_(true);
    graphed_.layers[1]({graphed_.layers[0]({x})[0]})[0].sum().backward();
    auto plain_layer = plain_.model->begin();
    at::Tensor h = plain_layer->forward(x_plain);
    (++plain_layer)->forward(h).sum().backward();
    EXPECT_TRUE(same({{"gradient of the input", x.grad()}}, {{"gradient of the input", x_plain.grad()}}));
    EXPECT_TRUE(same(gradients(*graphed_.model), gradients(*plain_.model)));
    expect_plain(graphed_, plain_, s, s + 1);  // the whole sequence after a part of it
  }
}

TEST_P(GraphedStackTest, OutputsMayBeUsedTwice) {
  graph();
  expect_plain_inner_gradients([&](std::int64_t i, const at::Tensor& h) {
    h.retain_grad();
    return (h * rows(i, device_)).sum();
  });
}

TEST_P(GraphedStackTest, GradientsOfInnerOutputsStay) {
  graph();
  expect_plain_inner_gradients([](std::int64_t i, const at::Tensor& h) { return i == 3 ? h.sum() : at::Tensor(); });
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
    expect_plain(graphed, plain, s, s + 1);
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
  const Callable callable("double", owning([&](const Tensors& in) {
                            log.push_back("run");
                            return Tensors{in[0] * 2};
                          }));
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
    StepTensors tensors = testing_model::gradients_and_buffers(*trainer.model);
    for (const auto& parameter : trainer.model->named_parameters()) {
      tensors.emplace_back(parameter.key(), parameter.value());
    }
    return tensors;
  };
  const auto before = state();
  torch::manual_seed(3);
  const at::Tensor drawn = at::rand({8}, at::TensorOptions().device(device_)).cpu();
  torch::manual_seed(3);
  trainer.graph(offload_all(), GraphOptions());
  EXPECT_TRUE(at::equal(at::rand({8}, at::TensorOptions().device(device_)).cpu(), drawn));
  EXPECT_TRUE(same(state(), before));
}

TEST_F(GraphedCallableTest, DropoutAndRunningStatisticsAreThoseOfThePlainStack) {
  const Mlp::Extras extras{0.3, true};
  StackTrainer plain(device_, 3, extras);
  StackTrainer graphed(device_, 3, extras);
  graphed.graph(offload_all(), GraphOptions());
  torch::manual_seed(4);
  std::vector<StepTensors> theirs;
  for (std::int64_t s = 0; s < kSteps; ++s) {
    theirs.push_back(plain.step(s));
  }
  torch::manual_seed(4);
  testing_model::expect_plain(
      0, kSteps, [&](std::int64_t s) { return graphed.step(s); },
      [&](std::int64_t s) { return theirs[static_cast<std::size_t>(s)]; });
  EXPECT_EQ(graphed.model->buffers().size(), 6U) << "the running statistics were compared";
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
  const auto graphed = make_graphed_callables(engine, {Callable("several", owning(function))},
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
      // A graph takes zeros as the gradient of an output that nobody uses: adding 0 gives every zero the same sign.
      return StepTensors{{"output 0", out[0]},
                         {"output 2", out[2]},
                         {"output 3", out[3]},
                         {"gradient of the weight", weight.grad() + 0},
                         {"gradient of input 0", in[0].grad() + 0},
                         {"gradient of input 1", in[1].grad()}};
    };
    const auto mine = run([&](const Tensors& in) { return graphed[0](in); });
    EXPECT_TRUE(same(mine, run(function))) << "step " << s;
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
  EXPECT_TRUE(at::equal(a.grad().cpu(), (a * 2).cpu()));
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
    EXPECT_TRUE(at::equal(y.cpu(), expected.cpu())) << "a shape that was not captured is no matter when eager";
  }
  plain.model->eval();
  graphed.model->eval();
  expect_plain(graphed, plain, 0, 1);
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
    expect_plain(graphed, plain, s, s + 1);
  }
}

TEST_F(GraphedCallableTest, TwoBackwardsOfARetainedGraph) {
  StackTrainer plain(device_);
  StackTrainer graphed(device_);
  graphed.graph(offload_all(), GraphOptions().retain_graph_in_backward(true));
  const auto twice = [&](torch::nn::Sequential& model, const std::function<at::Tensor(const at::Tensor&)>& run,
                         std::int64_t s) {
    const at::Tensor x = rows(s, device_).requires_grad_(true);
    StepTensors once;
    StepTensors result = train_step(*model, nullptr, [&] {
      const at::Tensor loss = run(x).square().mean();
      loss.backward({}, /*retain_graph=*/true);
      once = gradients(*model);
      loss.backward();
    });
    result.insert(result.end(), once.begin(), once.end());
    result.emplace_back("gradient of the input", x.grad());
    return result;
  };
  testing_model::expect_plain(
      0, 3,
      [&](std::int64_t s) {
        return twice(
            graphed.model, [&](const at::Tensor& x) { return run_stack(graphed.layers, x); }, s);
      },
      [&](std::int64_t s) {
        return twice(
            plain.model, [&](const at::Tensor& x) { return plain.model->forward(x); }, s);
      });
}

// A hook may keep what it is given: the graph's own memory would be overwritten by a later replay.
TEST_F(GraphedCallableTest, GradientsThatHooksKeepAreTheCallersOwn) {
  StackTrainer graphed(device_);
  graphed.graph(offload_all(), GraphOptions());
  std::vector<at::Tensor> kept;
  std::vector<at::Tensor> then;
  const auto keep = [&](const at::Tensor& grad) {
    kept.push_back(grad);
    then.push_back(grad.cpu());
  };
  const at::Tensor x = rows(0, device_).requires_grad_(true);
  x.register_hook(keep);
  const auto hook = graphed.model->parameters()[0].register_hook(keep);
  (run_stack(graphed.layers, x) * rows(0, device_, 1)).sum().backward();
  graphed.model->parameters()[0].remove_hook(hook);
  ASSERT_EQ(kept.size(), 2U);
  (void)graphed.step(1);
  EXPECT_TRUE(at::equal(kept[0].cpu(), then[0]));
  EXPECT_TRUE(at::equal(kept[1].cpu(), then[1]));
}

// Beside the sequence's own nodes a linked output may have others: what they are given stays theirs.
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
        then = grad.cpu();
      });
    }
  }
  (h * rows(0, device_, 1)).sum().backward();
  ASSERT_TRUE(kept.defined());
  EXPECT_TRUE(at::equal(kept.cpu(), then)) << "a later graph of the same backward wrote into it";
  (void)graphed.step(1);
  EXPECT_TRUE(at::equal(kept.cpu(), then)) << "a later replay wrote into it";
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
    callables.emplace_back("branch." + std::to_string(i), owning([weight = weights.back()](const Tensors& x) {
                             return Tensors{x[0].mul(weight).tanh().exp()};  // reads x once: one gradient comes back
                           }));
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
    return x.grad().cpu();
  };
  for (std::int64_t s = 0; s < kSteps; ++s) {
    EXPECT_TRUE(at::equal(gradient(true, s), gradient(false, s))) << "step " << s;
  }
}

}  // namespace
}  // namespace sidestream
