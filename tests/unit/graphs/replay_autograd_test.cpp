// What autograd may ask of a replay beside one backward of everything: the result of plain training, or an error by name.
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/utils.h>

#include "expect_throws.h"
#include "models/stack_twins.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sim/device/device.h"

namespace sidestream::testing_model {
namespace {

using torch::autograd::grad;

class ReplayAutogradTest : public testing::Test, protected StackTwins {
 protected:
  ReplayAutogradTest() : StackTwins(find_device("sim")) {}

  [[nodiscard]] at::Tensor weight(std::int64_t salt, std::int64_t columns = kHidden) const {
    return rows(salt, device, 9).slice(0, 0, 1).slice(1, 0, columns).clone().requires_grad_(true);
  }
  /// A whole step with its gradients as in plain training.
  void expect_usable(std::int64_t s) { (void)expect_plain(s); }
  /// A function of one input, captured as a callable, gives the gradients that it gives by itself: of its input and of `w`.
  void expect_same_graphed(const TensorFunction& function, const at::Tensor& w) {
    OffloadEngine engine(*model, Options(device).offload("**").min_bytes(1024));
    const auto graphed = make_graphed_callables(engine, {Callable("penalised", owning(function))}, {{input(0)}});
    for (std::int64_t s = 1; s < 5; ++s) {
      const auto step = [&](const TensorFunction& run) {
        const at::Tensor x = input(s);
        w.mutable_grad() = at::Tensor();
        (run({x})[0] * rows(s, device, 1)).sum().backward();
        return StepTensors{{"input", x.grad()}, {"weight", w.grad()}};
      };
      EXPECT_TRUE(same(step(graphed[0]), step(function))) << "step " << s;
    }
  }
};

TEST_F(ReplayAutogradTest, CreateGraphIsRefusedByItsName) {
  for (const bool retain : {false, true}) {
    capture(GraphOptions().retain_graph_in_backward(retain));
    const std::string message = message_of<UsageError>([&] {
      (void)grad({loss(true, input(0), 0)}, model->parameters(), {}, /*retain_graph=*/true, /*create_graph=*/true);
    });
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "create_graph", message);
    EXPECT_PRED_FORMAT2(testing::IsNotSubstring, "retain_graph_in_backward", message);
    EXPECT_THROWS(UsageError, "create_graph", {
      const at::Tensor x = input(0);
      (void)grad({loss(true, x, 0)}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true);
    });
    expect_usable(1);
  }
}

TEST_F(ReplayAutogradTest, GradientsOfSomeInputsLeaveGradAsItWas) {
  capture();
  const auto run = [&](const at::Tensor& loss, const at::Tensor& x, torch::nn::Sequential& model) {
    StepTensors result;
    for (const at::Tensor& gradient : grad({loss}, {x, model->parameters()[2]})) {
      result.emplace_back("gradient", gradient);
    }
    const StepTensors untouched = gradients(*model);
    result.insert(result.end(), untouched.begin(), untouched.end());
    return result;
  };
  for (std::int64_t s = 0; s < 3; ++s) {
    const at::Tensor x = input(s);
    const at::Tensor x_plain = input(s);
    EXPECT_TRUE(same(run(loss(true, x, s), x, model), run(loss(false, x_plain, s), x_plain, plain)));
  }
  expect_usable(4);
}

TEST_F(ReplayAutogradTest, GradientsOfSomeInputsWhereTheGraphOwnsGrad) {
  capture(GraphOptions().gradients("**", GradientPolicy::accumulated));
  expect_usable(0);
  const StepTensors before = gradients(*model);
  EXPECT_THROWS(UsageError, "only gradients of some inputs", {
    const at::Tensor x = input(1);
    (void)grad({loss(true, x, 1)}, {x});
  });
  // Autograd sees no way to it, and would say that it was not used.
  const at::Tensor parameter = model->parameters()[1];
  EXPECT_THROWS(UsageError, "whose .grad belongs to a graph",
                (void)grad({loss(true, input(1), 1)}, {parameter}, {}, false, false, /*allow_unused=*/true));
  EXPECT_THROWS(UsageError, "whose .grad belongs to a graph",
                loss(true, input(1), 1).backward({}, false, false, std::vector<at::Tensor>{parameter}));
  EXPECT_TRUE(same(gradients(*model), before)) << "nothing was added";
  const at::Tensor elsewhere = (parameter * parameter).sum();
  EXPECT_TRUE(at::equal(grad({elsewhere}, {parameter})[0].cpu(), (parameter * 2).cpu())) << "past the graphs";
  expect_usable(2);
}

TEST_F(ReplayAutogradTest, HooksThatCameAfterTheCaptureWhereTheGraphOwnsGrad) {
  capture(GraphOptions().gradients("**", GradientPolicy::accumulated));
  const at::Tensor parameter = model->parameters()[1];
  parameter.remove_hook(parameter.register_hook([](const at::Tensor& gradient) { return gradient; }));
  expect_usable(0);
  const auto hook = parameter.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
  EXPECT_THROWS(UsageError, "gradient hooks after the capture", loss(true, input(0), 0).backward());
  parameter.remove_hook(hook);
  expect_usable(1);
}

// Each allocation of a backward fails once. What is tried again then gives plain training's gradients, or says why not.
class FailedBackwardTest : public ReplayAutogradTest, public testing::WithParamInterface<bool> {};

TEST_P(FailedBackwardTest, IsTriedAgain) {
  const bool retain = GetParam();
  capture(GraphOptions().retain_graph_in_backward(retain));
  sim::Device& simulated = sim::Device::get();
  int equal = 0;
  int refused = 0;
  for (std::int64_t n = 0;; ++n) {
    const at::Tensor x = input(n);
    const at::Tensor x_plain = input(n);
    const auto wanted = [](const at::Tensor& of, torch::nn::Sequential& model) {
      std::vector<at::Tensor> tensors = model->parameters();
      tensors.push_back(of);
      return tensors;
    };
    const at::Tensor mine = loss(true, x, n);
    const auto all_of = [&](const at::Tensor& of, const std::vector<at::Tensor>& tensors, bool keep) {
      StepTensors result;
      for (const at::Tensor& gradient : grad({of}, tensors, {}, /*retain_graph=*/keep)) {
        result.emplace_back("gradient", gradient);
      }
      return result;
    };
    const StepTensors expected = all_of(loss(false, x_plain, n), wanted(x_plain, plain), false);
    simulated.fail_allocation(n);
    std::string failure;
    try {
      EXPECT_TRUE(same(all_of(mine, wanted(x, model), true), expected));
    } catch (const std::exception& error) {
      failure = error.what();
    }
    const bool met = simulated.allocation_failed();
    simulated.fail_allocation(-1);
    if (!met) {
      break;
    }
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "out of memory", failure);
    try {
      EXPECT_TRUE(same(all_of(mine, wanted(x, model), false), expected)) << "allocation " << n;
      ++equal;
    } catch (const UsageError& error) {
      EXPECT_PRED_FORMAT2(testing::IsSubstring, "run a second time", error.what());
      ++refused;
    }
  }
  EXPECT_GT(equal, 0);
  EXPECT_EQ(refused > 0, !retain) << "a layer whose backward has run keeps its saved tensors by option only";
  expect_usable(3);
}

INSTANTIATE_TEST_SUITE_P(Captured, FailedBackwardTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "Retained" : "Once"; });

// The graph above reloads what was offloaded below; here none is above, or one without a backward.
TEST_F(ReplayAutogradTest, ACallWithoutBackwardBetweenOffloadedOnes) {
  const std::vector<at::Tensor> weights{weight(0), weight(1), weight(2)};
  const auto mask_of = [](const Tensors& in) { return Tensors{in[0].gt(0).to(at::kFloat)}; };
  const auto layer = [&](std::size_t i) {
    return [w = weights[i]](const Tensors& in) { return Tensors{(in[0] * w).tanh().exp().sin()}; };
  };
  const auto masked = [w = weights[2]](const Tensors& in) { return Tensors{(in[0] * w).tanh().exp() * in[1]}; };
  const std::vector<TensorFunction> plain{mask_of, layer(0), mask_of, layer(1), masked, mask_of};
  for (const std::int64_t side_streams : {1, 2}) {
    std::vector<Callable> callables;
    for (std::size_t i = 0; i < plain.size(); ++i) {
      callables.emplace_back("call." + std::to_string(i), owning(plain[i]));
    }
    OffloadEngine engine(*model, Options(device).offload("**").min_bytes(1024));
    const auto own = [&](bool gradient) { return Sample(rows(0, device).requires_grad_(gradient)); };
    const auto graphed = make_graphed_callables(engine, callables,
                                                {{own(false)},
                                                 {own(true)},
                                                 {own(false)},
                                                 {Sample::output_of(1)},
                                                 {Sample::output_of(3), Sample::output_of(2)},
                                                 {own(false)}},
                                                GraphOptions().side_streams(side_streams));
    std::vector<TensorFunction> replayed;
    for (const GraphedCallable& callable : graphed) {
      replayed.emplace_back(callable);
    }
    const auto step = [&](const std::vector<TensorFunction>& calls, std::int64_t s) {
      const at::Tensor x = rows(s, device).requires_grad_(true);
      for (const at::Tensor& w : weights) {
        w.mutable_grad() = at::Tensor();
      }
      const at::Tensor first = calls[0]({x.detach()})[0];
      const at::Tensor h = calls[1]({x})[0];
      const at::Tensor mask = calls[2]({h.detach()})[0];
      const at::Tensor y = calls[4]({calls[3]({h})[0], mask})[0];
      const at::Tensor last = calls[5]({y.detach()})[0];
      (y * first * last).sum().backward();
      return StepTensors{{"input", x.grad()},
                         {"weight 0", weights[0].grad()},
                         {"weight 1", weights[1].grad()},
                         {"weight 2", weights[2].grad()}};
    };
    for (std::int64_t s = 0; s < 4; ++s) {
      const auto in_step = engine.step();
      const StepTensors expected = step(plain, s);
      EXPECT_TRUE(same(step(replayed, s), expected)) << "K " << side_streams << ", step " << s;
    }
    EXPECT_GT(engine.report().offloaded_bytes, 0);
    EXPECT_EQ(engine.report().reloaded_bytes, engine.report().offloaded_bytes);
  }
}

TEST_F(ReplayAutogradTest, AGradientInsideOfABody) {
  const at::Tensor w = weight(3);
  const TensorFunction penalised = [w](const Tensors& in) {
    const at::Tensor y = (in[0] * w).tanh().square().sum();
    const at::Tensor slope = grad({y}, {in[0]}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    return Tensors{slope * in[0]};
  };
  expect_same_graphed(penalised, w);
}

TEST_F(ReplayAutogradTest, AGradientInsideOfABodyOfALeafThatItMakes) {
  const at::Tensor w = weight(3);
  const TensorFunction penalised = [w](const Tensors& in) {
    const at::Tensor leaf = in[0].detach().requires_grad_();
    const at::Tensor noise = at::ones_like(leaf).requires_grad_();
    const at::Tensor y = (leaf * noise * w).tanh().square().sum();
    const Tensors slopes = grad({y}, {leaf, noise}, {}, /*retain_graph=*/true, /*create_graph=*/true);
    return Tensors{slopes[0] * in[0] + slopes[1]};
  };
  expect_same_graphed(penalised, w);
}

TEST_F(ReplayAutogradTest, AHookThatABodyRegistersIsCaptured) {
  OffloadEngine engine(*model, Options(device).offload("**").min_bytes(1024));
  const at::Tensor w = weight(4);
  const TensorFunction hooked = [w](const Tensors& in) {
    const at::Tensor h = in[0] * w;
    h.register_hook([](const at::Tensor& gradient) { return gradient.clamp(-0.1, 0.1); });
    return Tensors{h.exp()};
  };
  const auto graphed = make_graphed_callables(engine, {Callable("hooked", owning(hooked))}, {{input(0)}});
  for (std::int64_t s = 1; s < 4; ++s) {
    const auto step = [&](const TensorFunction& function) {
      const at::Tensor x = input(s);
      w.mutable_grad() = at::Tensor();
      function({x})[0].sum().backward();
      return StepTensors{{"input", x.grad()}, {"weight", w.grad()}};
    };
    EXPECT_TRUE(same(step(graphed[0]), step(hooked))) << "step " << s;
  }
  ASSERT_EQ(engine.report().notes.size(), 1U);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "\"hooked\" registers gradient hooks", engine.report().notes[0]);
}

TEST_F(ReplayAutogradTest, HooksThatABodyRegistersOnWhatIsNotItsOwn) {
  OffloadEngine engine(*model, Options(device));
  const at::Tensor w = weight(4);
  const auto capture_body = [&](const TensorFunction& body) {
    (void)make_graphed_callables(engine, {Callable("hooked", owning(body))}, {{input(0)}});
  };
  EXPECT_THROWS(CaptureError, "gradient hook on an input or a parameter", capture_body([&](const Tensors& in) {
                  in[0].register_hook([](const at::Tensor& gradient) { return gradient * 2; });
                  return Tensors{in[0] * w};
                }));
  EXPECT_THROWS(CaptureError, "retain_grad", capture_body([&](const Tensors& in) {
                  const at::Tensor h = in[0] * w;
                  h.retain_grad();
                  return Tensors{h.exp()};
                }));
  capture_body([&](const Tensors& in) { return Tensors{in[0] * w}; });
}

// A function's weights are not a module's: nothing but the capture itself looks after their gradients.
TEST_F(ReplayAutogradTest, ACallByFunctionWhileGradIsThere) {
  torch::nn::Module model;
  OffloadEngine engine(model, Options(device).graph("head"));
  static at::Tensor mine;  // found by a function that captures nothing
  mine = weight(5);
  const at::Tensor theirs = weight(5);
  for (std::int64_t s = 0; s < 4; ++s) {  // gradients are added up over all steps
    const at::Tensor x = input(s);
    const at::Tensor x_plain = input(s);
    testing_model::in_step(&engine, [&] {
      const at::Tensor y = call(
          "head", [](const at::Tensor& h) { return (h * mine).tanh(); }, x);
      (y * rows(s, device, 1)).sum().backward();
    });
    ((x_plain * theirs).tanh() * rows(s, device, 1)).sum().backward();
    EXPECT_TRUE(
        same({{"input", x.grad()}, {"weight", mine.grad()}}, {{"input", x_plain.grad()}, {"weight", theirs.grad()}}))
        << "step " << s;
  }
  EXPECT_GT(engine.report().replays, 0);
  mine = at::Tensor();
}

TEST_F(ReplayAutogradTest, AnEagerHeadSharesAWeightWhoseGradTheGraphOwns) {
  for (const bool set_to_none : {true, false}) {
    torch::nn::Module model;
    OffloadEngine engine(model, Options(device));
    const at::Tensor mine = weight(6).detach().round().requires_grad_(true);
    const at::Tensor theirs = mine.detach().clone().requires_grad_(true);  // in whole numbers, whose sums have no order
    const auto body = [](const at::Tensor& w) {
      return TensorFunction([w](const Tensors& in) { return Tensors{in[0].square() * w}; });
    };
    const auto graphed = make_graphed_callables(engine, {Callable("body", owning(body(mine)))}, {{input(0)}},
                                                GraphOptions().gradients("**", GradientPolicy::accumulated));
    const auto step = [&](const TensorFunction& function, const at::Tensor& w, std::int64_t s) {
      if (set_to_none) {
        w.mutable_grad() = at::Tensor();
      } else if (w.grad().defined()) {
        w.mutable_grad().zero_();
      }
      const at::Tensor x = input(s).detach().round().requires_grad_(true);
      const at::Tensor embedded = x * w;                            // its backward runs after the graph's
      const at::Tensor head = (function({embedded})[0] * w).sum();  // and this one's before
      head.backward();
      return StepTensors{{"input", x.grad()}, {"weight", w.grad()}};
    };
    for (std::int64_t s = 1; s < 4; ++s) {
      EXPECT_TRUE(same(step(graphed[0], mine, s), step(body(theirs), theirs, s))) << set_to_none << ", step " << s;
    }
  }
}

// Shapes and microbatches have captures of their own, and the weight has one gradient.
TEST_F(ReplayAutogradTest, SeveralCapturesShareTheGradThatTheyOwn) {
  torch::nn::Module model;
  OffloadEngine engine(
      model, Options(device).graph("scale").graph_options(GraphOptions().gradients("**", GradientPolicy::accumulated)));
  static at::Tensor mine;
  mine = weight(5).detach().round().requires_grad_(true);
  const at::Tensor theirs = mine.detach().clone().requires_grad_(true);  // in whole numbers, whose sums have no order
  const auto first_rows = [&](std::int64_t s, std::int64_t count) {
    return rows(s, device).slice(0, 0, count).round();
  };
  for (std::int64_t s = 0; s < 8; ++s) {
    mine.mutable_grad() = at::Tensor();
    theirs.mutable_grad() = at::Tensor();
    testing_model::in_step(&engine, [&] {
      EXPECT_FALSE(mine.grad().defined()) << "a capture gives no gradient";
      if (s == 4) {
        return;  // nor does a step that makes no call
      }
      at::Tensor sum;
      for (const std::int64_t count : s < 2 ? std::vector<std::int64_t>{16} : std::vector<std::int64_t>{16, 16, 8}) {
        const at::Tensor x = first_rows(s, count);
        const at::Tensor y = call(
                                 "scale", [](const at::Tensor& h) { return h.square() * mine; }, x)
                                 .sum();
        sum = sum.defined() ? sum + y : y;
        (first_rows(s, count).square() * theirs).sum().backward();
      }
      sum.backward();
    });
    EXPECT_TRUE(same({{"weight", mine.grad()}}, {{"weight", theirs.grad()}})) << "step " << s;
  }
  EXPECT_EQ(engine.report().captures, 6);
  mine = at::Tensor();
}

TEST_F(ReplayAutogradTest, OutputsThatAStepDoesNotUse) {
  for (const bool accumulate : {false, true}) {
    torch::nn::Module model;
    OffloadEngine engine(model, Options(device).offload("**").min_bytes(1024));
    const std::vector<at::Tensor> mine{weight(7), weight(8), weight(9)};
    const std::vector<at::Tensor> theirs{weight(7), weight(8), weight(9)};
    const auto body = [](const std::vector<at::Tensor>& w) {
      return TensorFunction([w](const Tensors& in) {
        const at::Tensor shared = in[0] * w[0];
        return Tensors{(shared * w[1]).tanh(), (in[1] * w[2]).exp()};
      });
    };
    const auto graphed = make_graphed_callables(
        engine, {Callable("two", owning(body(mine)))}, {{input(0), input(1)}},
        GraphOptions().gradients("**", accumulate ? GradientPolicy::accumulated : GradientPolicy::cloned));
    const auto step = [&](const TensorFunction& function, const std::vector<at::Tensor>& w, std::int64_t s) {
      for (const at::Tensor& each : w) {
        each.mutable_grad() = at::Tensor();
      }
      const at::Tensor x = input(s);
      const at::Tensor z = input(s + 10);
      const Tensors out = function({x, z});
      (out[static_cast<std::size_t>(s % 2)] * rows(s, device, 1)).sum().backward();
      StepTensors result{{"x", x.grad()}, {"z", z.grad()}};
      for (const at::Tensor& each : w) {
        result.emplace_back("weight", each.grad());
      }
      return result;
    };
    for (std::int64_t s = 0; s < 4; ++s) {
      const auto in_step = engine.step();
      const StepTensors expected = step(body(theirs), theirs, s);
      EXPECT_TRUE(same(step(graphed[0], mine, s), expected)) << accumulate << ", step " << s;
    }
    EXPECT_EQ(engine.report().unused_outputs, 1);
  }
}

}  // namespace
}  // namespace sidestream::testing_model
