// Calls that return a parameter or a view of one: autograd gives the parameter that gradient outside of the graphs.
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>

#include "expect_throws.h"
#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/owning.h"

namespace sidestream::testing_model {
namespace {

/// The weights are no views: a view that is made without gradients shows the flag of the last base.
struct TwoWeights : torch::nn::Module {
  explicit TwoWeights(c10::Device device) {
    const at::TensorOptions on(device);
    returned =
        register_parameter("returned", at::linspace(-1, 1, kHidden * kHidden, on).view({kHidden, kHidden}).clone());
    used = register_parameter("used", at::linspace(0.3, -0.2, kHidden * kHidden, on).view({kHidden, kHidden}).clone());
  }
  at::Tensor returned, used;
};

struct ReturningBody {
  const char* name;
  Tensors (*run)(TwoWeights& model, const at::Tensor& x);
};

const std::vector<ReturningBody> bodies{
    {"Itself",
     [](TwoWeights& m, const at::Tensor& x) {
       return Tensors{x.tanh(), m.returned};
     }},
    {"View",
     [](TwoWeights& m, const at::Tensor& x) {
       return Tensors{x.tanh(), m.returned.t()};
     }},
    {"ItselfBesideAnother",
     [](TwoWeights& m, const at::Tensor& x) {
       return Tensors{at::linear(x, m.used).tanh(), m.returned};
     }},
    {"ViewBesideAnother",
     [](TwoWeights& m, const at::Tensor& x) {
       return Tensors{at::linear(x, m.used).tanh(), m.returned.t()};
     }},
    {"Several",
     [](TwoWeights& m, const at::Tensor& x) {
       return Tensors{m.returned.narrow(0, 0, kHidden), at::linear(x, m.used).tanh(), m.returned,
                      m.returned.chunk(2)[1].t(), m.returned};
     }},
    {"UsedToo",
     [](TwoWeights& m, const at::Tensor& x) {
       return Tensors{at::linear(x, m.returned).tanh(), m.returned.t()};
     }},
    {"Alone",
     [](TwoWeights& m, const at::Tensor& x) {
       return Tensors{m.returned.t(), x.detach().exp()};
     }},
    {"BesideTheInput",
     [](TwoWeights& m, const at::Tensor& x) {
       return Tensors{x, at::linear(x, m.used), m.returned.t()};
     }},
};

enum class ReturningWay : std::uint8_t { call, callable, delayed, owned, accumulated };

class ReturnedParameterTest : public testing::TestWithParam<std::tuple<ReturningBody, ReturningWay>> {};

at::Tensor loss_of(const Tensors& outputs, std::int64_t s) {
  at::Tensor loss = outputs[0].sum() * 0;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    loss = loss + (outputs[i].square() * (0.1 * static_cast<double>(s + 1) + static_cast<double>(i))).mean();
  }
  return loss;
}

/// `flat`: both weights are parts of one buffer.
void expect_plain_gradients(const ReturningBody& body, ReturningWay way, bool flat) {
  const c10::Device device = find_device("sim");
  const auto model = std::make_shared<TwoWeights>(device);
  const auto plain = std::make_shared<TwoWeights>(device);
  if (flat) {
    flatten_parameters(*model);
  }
  GraphOptions graph = GraphOptions().allow_unused_input(true);
  if (way != ReturningWay::call && way != ReturningWay::callable) {
    graph.gradients("**", way == ReturningWay::delayed ? GradientPolicy::delayed
                          : way == ReturningWay::owned ? GradientPolicy::owned
                                                       : GradientPolicy::accumulated);
  }
  Options options = Options(device).min_bytes(16).offload("**");
  if (way == ReturningWay::call) {
    options.graph("returns").graph_options(graph);
  }
  OffloadEngine engine(*model, options);
  std::vector<GraphedCallable> graphed;
  const auto input = [&](std::int64_t s) { return rows(s, device).requires_grad_(true); };
  if (way != ReturningWay::call) {
    graphed = make_graphed_callables(
        engine,
        {Callable("returns",
                  owning([run = body.run](TwoWeights& m, const Tensors& inputs) { return run(m, inputs[0]); }), model)},
        {{input(90)}}, graph);
  }
  for (std::int64_t s = 0; s < 5; ++s) {
    expect_same_step(*model, &engine, *plain, s, [&](TwoWeights& m) {
      const at::Tensor x = input(s);
      const at::Tensor h = x.view_as(x);
      const Tensors outputs = &m == &*plain               ? body.run(m, h)
                              : way == ReturningWay::call ? call("returns", body.run, m, h)
                                                          : graphed[0]({h});
      loss_of(outputs, s).backward();
      if (way == ReturningWay::delayed && &m == &*model) {
        engine.backward_dw();
      }
      Tensors all = outputs;
      all.push_back(x.grad());
      return values(all);
    });
  }
  EXPECT_GT(engine.report().replays, 0);
  EXPECT_EQ(engine.report().eager_calls, way == ReturningWay::call ? 1 : 0) << "the sizing pass of the first step";
}

TEST_P(ReturnedParameterTest, HasPlainTrainingsGradient) {
  for (const bool flat : {false, true}) {
    SCOPED_TRACE(flat ? "in one buffer" : "");
    expect_plain_gradients(std::get<0>(GetParam()), std::get<1>(GetParam()), flat);
  }
}

std::string name_of_way(const testing::TestParamInfo<std::tuple<ReturningBody, ReturningWay>>& info) {
  const std::vector<std::string> ways{"Call", "Callable", "Delayed", "Owned", "Accumulated"};
  return std::get<0>(info.param).name + ways[static_cast<std::size_t>(std::get<1>(info.param))];
}

INSTANTIATE_TEST_SUITE_P(Ways, ReturnedParameterTest,
                         testing::Combine(testing::ValuesIn(bodies),
                                          testing::Values(ReturningWay::call, ReturningWay::callable,
                                                          ReturningWay::delayed, ReturningWay::owned,
                                                          ReturningWay::accumulated)),
                         name_of_way);

/// The identity, as a view. Its gradient is not a view's.
class Reversed : public torch::autograd::Function<Reversed> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) { return x.view_as(x); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 const torch::autograd::variable_list& gradients) {
    return {-gradients[0]};
  }
};

/// Trains with the call `body`, five steps.
void expect_plain_with(const ReturningBody& body) {
  const c10::Device device = find_device("sim");
  TwoWeights model(device), plain(device);
  OffloadEngine engine(model, Options(device).graph("returns"));
  for (std::int64_t s = 0; s < 5; ++s) {
    expect_same_step(model, &engine, plain, s, [&](TwoWeights& m) {
      const at::Tensor x = rows(s, device).requires_grad_(true);
      const at::Tensor h = x.view_as(x);
      loss_of(&m == &plain ? body.run(m, h) : call("returns", body.run, m, h), s).backward();
      return values({x.grad()});
    });
  }
  EXPECT_GT(engine.report().replays, 0);
}

TEST(ReturnedViewOfAFunction, IsRefused) {
  const std::vector<ReturningBody> refused{
      {"of a parameter",
       [](TwoWeights& m, const at::Tensor& x) {
         return Tensors{x.tanh(), Reversed::apply(m.returned)};
       }},
      {"of a parameter that is used too",
       [](TwoWeights& m, const at::Tensor& x) {
         return Tensors{at::linear(x, m.returned).tanh(), Reversed::apply(m.returned).t()};
       }},
      {"of an input",
       [](TwoWeights& m, const at::Tensor& x) {
         return Tensors{at::linear(x, m.used).tanh(), Reversed::apply(x)};
       }},
  };
  for (const ReturningBody& body : refused) {
    SCOPED_TRACE(body.name);
    EXPECT_THROWS(CaptureError, "that an autograd function of the callable returns", expect_plain_with(body));
  }
}

TEST(ReturnedViewOfAFunction, IsTheFunctionsIfItIsClonedOrOfATensorOfTheBody) {
  expect_plain_with(
      {"cloned", [](TwoWeights& m, const at::Tensor& x) {
         return Tensors{at::linear(x, m.used).tanh(), Reversed::apply(m.returned).clone(), Reversed::apply(x).clone()};
       }});
  expect_plain_with({"of the body's own", [](TwoWeights& m, const at::Tensor& x) {
                       return Tensors{Reversed::apply(at::linear(x, m.used)).t()};
                     }});
}

// Views that are made without gradients have the flag of their base.
TEST(ReturnedParameter, EvaluationsReplayToo) {
  const c10::Device device = find_device("sim");
  const at::NoGradGuard no_grad;
  for (const ReturningBody& body : bodies) {
    SCOPED_TRACE(body.name);
    TwoWeights model(device);
    TwoWeights plain(device);
    OffloadEngine engine(
        model, Options(device).graph("returns").call_options(CallOptions().on_evaluation(OnEvaluation::capture)));
    for (std::int64_t s = 0; s < 4; ++s) {
      Tensors outputs;
      in_step(&engine, [&] { outputs = call("returns", body.run, model, rows(s, device)); });
      EXPECT_TRUE(same(values(outputs), values(body.run(plain, rows(s, device))))) << "step " << s;
    }
    EXPECT_EQ(engine.report().replays, 1) << "of the last step";
  }
}

TEST(ReturnedParameter, AViewThatWasMadeWithoutGradientsGivesItsBaseNone) {
  const c10::Device device = find_device("sim");
  TwoWeights model(device);
  OffloadEngine engine(model, Options(device).graph("returns"));
  const auto body = [](TwoWeights& m, const at::Tensor& x) {
    const at::Tensor y = at::linear(x, m.used);
    const at::NoGradGuard no_grad;
    return Tensors{y, m.returned.t()};
  };
  for (std::int64_t s = 0; s < 3; ++s) {
    in_step(&engine, [&] { loss_of(call("returns", body, model, rows(s, device)), s).backward(); });
    EXPECT_FALSE(model.returned.grad().defined()) << "step " << s;
    EXPECT_TRUE(model.used.grad().defined());
  }
  EXPECT_EQ(engine.report().replays, 2);
}

// Its gradient would be missing in the replays.
TEST(ReturnedLeafOfTheBody, IsRefused) {
  const std::vector<ReturningBody> refused{
      {"in an input's memory",
       [](TwoWeights& m, const at::Tensor& x) {
         const at::Tensor leaf = x.detach().requires_grad_();
         return Tensors{at::linear(leaf, m.used).tanh(), leaf};
       }},
      {"in a parameter's memory",
       [](TwoWeights& m, const at::Tensor& x) {
         const at::Tensor leaf = m.returned.detach().requires_grad_();
         return Tensors{at::linear(x, leaf).tanh(), leaf, at::linear(x, m.used)};
       }},
      {"in memory of its own",
       [](TwoWeights& m, const at::Tensor& x) {
         const at::Tensor leaf = x.detach().clone().requires_grad_();
         return Tensors{at::linear(leaf, m.used).tanh(), leaf};
       }},
  };
  const c10::Device device = find_device("sim");
  for (const ReturningBody& body : refused) {
    SCOPED_TRACE(body.name);
    TwoWeights model(device);
    OffloadEngine engine(model, Options(device).graph("returns"));
    const auto step = [&] {
      in_step(&engine, [&] { loss_of(call("returns", body.run, model, rows(0, device)), 0).backward(); });
    };
    step();
    const std::string message = message_of<CaptureError>(step);
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "graphed call \"returns\": output 1 is a leaf", message);
    EXPECT_EQ(message.find("graphed call"), message.rfind("graphed call")) << "named once: " << message;
  }
}

}  // namespace
}  // namespace sidestream::testing_model
