#include "sidestream/graphed_callable.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/utils.h>

#include "expect_throws.h"
#include "models/stack_twins.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"

namespace sidestream::testing_model {
namespace {

class GraphedCallableTest : public testing::Test {
 protected:
  static constexpr std::int64_t kSteps = 5;

  [[nodiscard]] Options offload_all() const { return Options(device_).offload("layers.*.*").min_bytes(1024); }
  [[nodiscard]] Options no_offload() const { return Options(device_); }

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
    stacks_.capture(GetParam().offload ? offload_all() : no_offload(),
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
    const auto layers_of = [&](bool graphed) {
      return [this, graphed](std::int64_t i, const at::Tensor& h) {
        return stacks_.run_layer(graphed, static_cast<std::size_t>(i), h);
      };
    };
    EXPECT_TRUE(same(inner(layers_of(true)), inner(layers_of(false))));
  }

  StackTwins stacks_{device_};
};

TEST_P(GraphedStackTest, TrainsAsThePlainStack) {
  graph();
  stacks_.expect_plain(0, kSteps);
}

TEST_P(GraphedStackTest, AddsIntoGradientsAsThePlainStack) {
  graph(GraphOptions().gradients("**", GradientPolicy::accumulated));
  stacks_.expect_plain(0, kSteps);
}

TEST_P(GraphedStackTest, RunsBackwardOnWhatIsLeftOfTheSequence) {
  graph();
  for (std::int64_t s = 0; s < 3; ++s) {
    const auto part = [&](bool graphed) {
      const at::Tensor x = stacks_.input(s);
      stacks_.run_layer(graphed, 1, stacks_.run_layer(graphed, 0, x)).sum().backward();
      StepTensors result = gradients(graphed ? *stacks_.model : *stacks_.plain);
      result.emplace_back("gradient of the input", x.grad());
      return result;
    };
    EXPECT_TRUE(same(part(true), part(false)));
    (void)stacks_.expect_plain(s);  // the whole sequence after a part of it
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
  StackTwins stacks(device_);
  stacks.capture();
  for (std::int64_t s = 0; s < kSteps; ++s) {
    const StepTensors expected = stacks.step(false, s);
    const auto step = stacks.engine->step();
    EXPECT_TRUE(same(stacks.step(true, s), expected)) << "step " << s;
  }
  const Report report = stacks.engine->report();
  EXPECT_EQ(report.captures, 8);
  EXPECT_EQ(report.replays, 8);
  EXPECT_GT(report.offloaded_bytes, 0);
  EXPECT_EQ(report.offloaded_bytes, report.reloaded_bytes);
  EXPECT_EQ(report.inline_reloads, 0);
}

TEST_F(GraphedCallableTest, WarmUpRunsBetweenItsHooks) {
  std::vector<std::string> log;
  const auto doubled = owning([&](const Tensors& in) {
    log.push_back("run");
    return Tensors{in[0] * 2};
  });
  const Sample sample(rows(0, device_).requires_grad_(true));
  torch::nn::Module model;
  OffloadEngine engine(model, no_offload());
  for (const std::int64_t iterations : {0, 1, 3}) {
    log.clear();
    const auto graphed =
        make_graphed_callables(engine, {Callable("first", doubled), Callable("second", doubled)}, {{sample}, {sample}},
                               GraphOptions()
                                   .num_warmup_iters(iterations)
                                   .pre_warmup_hook([&] { log.push_back("pre"); })
                                   .post_warmup_hook([&] { log.push_back("post"); }));
    std::vector<std::string> expected{"pre", "run", "run"};
    expected.insert(expected.end(), static_cast<std::size_t>(2 * iterations), "run");
    expected.insert(expected.end(), {"post", "run", "run"});
    EXPECT_EQ(log, expected) << "of both the sizing pass, " << iterations << " more, and the capture";
    (void)graphed[0]({rows(1, device_).requires_grad_(true)});
    EXPECT_EQ(log, expected) << "a replay runs no user code";
  }
}

TEST_F(GraphedCallableTest, CaptureLeavesGradientsBuffersAndRandomStateAsTheyWere) {
  StackTwins trainer(device_, 3, {0.3, true});
  (trainer.model->forward(rows(1, device_))).sum().backward();
  const auto state = [&] {
    StepTensors tensors = gradients_and_buffers(*trainer.model);
    for (const auto& parameter : trainer.model->named_parameters()) {
      tensors.emplace_back(parameter.key(), parameter.value());
    }
    return tensors;
  };
  const auto before = state();
  torch::manual_seed(3);
  const at::Tensor drawn = at::rand({8}, at::TensorOptions().device(device_)).cpu();
  torch::manual_seed(3);
  trainer.capture();
  EXPECT_TRUE(at::equal(at::rand({8}, at::TensorOptions().device(device_)).cpu(), drawn));
  EXPECT_TRUE(same(state(), before));
}

TEST_F(GraphedCallableTest, DropoutAndRunningStatisticsAreThoseOfThePlainStack) {
  StackTwins stacks(device_, 3, {0.3, true});
  stacks.capture();
  std::vector<StepTensors> expected;
  torch::manual_seed(4);
  for (std::int64_t s = 0; s < kSteps; ++s) {
    expected.push_back(stacks.step(false, s));
  }
  torch::manual_seed(4);
  for (std::int64_t s = 0; s < kSteps; ++s) {
    EXPECT_TRUE(same(stacks.step(true, s), expected[static_cast<std::size_t>(s)])) << "step " << s;
  }
  EXPECT_EQ(stacks.model->buffers().size(), 6U) << "the running statistics were compared";
}

TEST_F(GraphedCallableTest, TakesAndGivesSeveralTensorsSomeUndefined) {
  torch::nn::Module model;
  OffloadEngine engine(model, no_offload());
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
  torch::nn::Module model;
  OffloadEngine engine(model, no_offload());
  const std::vector<Callable> callables{Callable("first", [](const Tensors& in) { return Tensors{in[0] * in[0]}; })};
  const std::vector<std::vector<Sample>> samples{
      {rows(0, device_).requires_grad_(true), rows(1, device_).requires_grad_(true)}};
  EXPECT_THROWS(UsageError,
                "graphed call \"first\": input 1 requires a gradient but gets none; pass it without requires_grad, or "
                "set GraphOptions::allow_unused_input",
                (void)make_graphed_callables(engine, callables, samples));
  const auto graphed = make_graphed_callables(engine, callables, samples, GraphOptions().allow_unused_input(true));
  const at::Tensor a = rows(2, device_).requires_grad_(true);
  const at::Tensor b = rows(3, device_).requires_grad_(true);
  graphed[0]({a, b})[0].sum().backward();
  EXPECT_TRUE(at::equal(a.grad().cpu(), (a * 2).cpu()));
  EXPECT_FALSE(b.grad().defined());
}

TEST_F(GraphedCallableTest, RunsEagerlyUnderNoGradAndInEval) {
  StackTwins stacks(device_, 2, {0.5, false});
  stacks.capture();
  const at::Tensor other_shape = rows(0, device_).slice(0, 0, 5);
  {
    const at::NoGradGuard no_grad;
    torch::manual_seed(8);
    const at::Tensor expected = stacks.forward(false, other_shape);
    torch::manual_seed(8);
    const at::Tensor y = stacks.forward(true, other_shape);
    EXPECT_FALSE(y.requires_grad());
    EXPECT_TRUE(at::equal(y.cpu(), expected.cpu())) << "a shape that was not captured is no matter when eager";
  }
  for (const bool training : {false, true}) {
    stacks.plain->train(training);
    stacks.model->train(training);
    torch::manual_seed(9);
    const StepTensors expected = stacks.step(false, 1);
    torch::manual_seed(9);
    EXPECT_TRUE(same(stacks.step(true, 1), expected)) << training;
  }
}

TEST_F(GraphedCallableTest, ADroppedForwardLetsTheNextRun) {
  StackTwins stacks(device_);
  stacks.capture();
  for (std::int64_t s = 0; s < 3; ++s) {
    (void)stacks.forward(true, stacks.input(50 + s));
    (void)stacks.expect_plain(s);
  }
}

TEST_F(GraphedCallableTest, TwoBackwardsOfARetainedGraph) {
  StackTwins stacks(device_, 4, GraphOptions().retain_graph_in_backward(true));
  const auto twice = [&](bool graphed, std::int64_t s) {
    torch::nn::Sequential& model = graphed ? stacks.model : stacks.plain;
    const at::Tensor x = stacks.input(s);
    StepTensors once;
    StepTensors result = train_step(*model, nullptr, [&] {
      const at::Tensor loss = stacks.forward(graphed, x).square().mean();
      loss.backward({}, /*retain_graph=*/true);
      once = gradients(*model);
      loss.backward();
    });
    result.insert(result.end(), once.begin(), once.end());
    result.emplace_back("gradient of the input", x.grad());
    return result;
  };
  expect_plain(
      0, 3, [&](std::int64_t s) { return twice(true, s); }, [&](std::int64_t s) { return twice(false, s); });
}

// A hook may keep what it is given: the graph's own memory would be overwritten by a later replay.
TEST_F(GraphedCallableTest, GradientsThatHooksKeepAreTheCallersOwn) {
  StackTwins graphed(device_);
  graphed.capture();
  std::vector<at::Tensor> kept;
  std::vector<at::Tensor> then;
  const auto keep = [&](const at::Tensor& grad) {
    kept.push_back(grad);
    then.push_back(grad.cpu());
  };
  const at::Tensor x = rows(0, device_).requires_grad_(true);
  x.register_hook(keep);
  const auto hook = graphed.model->parameters()[0].register_hook(keep);
  (graphed.forward(true, x) * rows(0, device_, 1)).sum().backward();
  graphed.model->parameters()[0].remove_hook(hook);
  ASSERT_EQ(kept.size(), 2U);
  (void)graphed.step(true, 1);
  EXPECT_TRUE(at::equal(kept[0].cpu(), then[0]));
  EXPECT_TRUE(at::equal(kept[1].cpu(), then[1]));
}

// Beside the sequence's own nodes a linked output may have others: what they are given stays theirs.
TEST_F(GraphedCallableTest, AViewBetweenLinkedCallsKeepsItsGradient) {
  StackTwins graphed(device_);
  graphed.capture();
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
  (void)graphed.step(true, 1);
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
}  // namespace sidestream::testing_model
