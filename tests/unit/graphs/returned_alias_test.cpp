// Calls that return what shares memory with an input, a table or another output: each output has the gradient, the hooks and the
// identity of plain training, or is refused by name.
#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include "expect_throws.h"
#include "models/plain_twin.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/owning.h"

namespace sidestream::testing_model {
namespace {

struct Scaled : torch::nn::Module {
  explicit Scaled(c10::Device device) {
    const at::TensorOptions on(device);
    weight = register_parameter("weight", at::linspace(0.5, 2, 6, on).view({2, 3}).clone());
    table = register_buffer("table", at::arange(12.0, on));
  }
  at::Tensor weight, table;
};

using AliasBody = Tensors (*)(Scaled& model, const at::Tensor& x);
/// What the program makes of the outputs: a loss, and tensors to compare.
using AliasUse = at::Tensor (*)(const Tensors& outputs, std::int64_t s, StepTensors& seen);

struct AliasCase {
  const char* name;
  AliasBody body;
  AliasUse use;
};

std::ostream& operator<<(std::ostream& out, const AliasCase& each) { return out << each.name; }

at::Tensor sum_of_both(const Tensors& outputs, std::int64_t /*s*/, StepTensors& /*seen*/) {
  return (outputs[0].sum() + outputs[1].square().sum());
}

/// The program trains the second output itself.
at::Tensor trains_the_second(const Tensors& outputs, std::int64_t /*s*/, StepTensors& seen) {
  at::Tensor own = outputs[1];
  own.requires_grad_(true);
  (outputs[0].sum() + (own * own).sum()).backward();
  seen.emplace_back("of the output", own.grad());
  return {};
}

/// The program changes the shape of the second output in place.
at::Tensor shapes_the_second(const Tensors& outputs, std::int64_t /*s*/, StepTensors& seen) {
  at::Tensor own = outputs[1];
  own.unsqueeze_(0);
  seen.emplace_back("the output", own.clone());
  return outputs[0].sum();
}

const std::vector<AliasCase> alias_cases{
    {"InputDetached",
     [](Scaled& m, const at::Tensor& x) {
       return Tensors{x * m.weight, x.detach()};
     },
     sum_of_both},
    {"InputsData",
     [](Scaled& m, const at::Tensor& x) {
       return Tensors{x * m.weight, x.variable_data()};
     },
     sum_of_both},
    {"PartOfTheInputDetached",
     [](Scaled& m, const at::Tensor& x) {
       return Tensors{x * m.weight, x.narrow(0, 1, 1).detach()};
     },
     sum_of_both},
    {"DetachedAndThenAPart",
     [](Scaled& m, const at::Tensor& x) {
       return Tensors{x * m.weight, x.detach().t()};
     },
     sum_of_both},
    {"PartOfATable",
     [](Scaled& m, const at::Tensor& x) {
       return Tensors{x * m.weight, m.table.narrow(0, 2, 4)};
     },
     trains_the_second},
    {"PartOfATableInAnotherShape",
     [](Scaled& m, const at::Tensor& x) {
       return Tensors{x * m.weight, m.table.narrow(0, 2, 4)};
     },
     shapes_the_second},
    {"WeightDetached",
     [](Scaled& m, const at::Tensor& x) {
       return Tensors{x * m.weight, m.weight.detach()};
     },
     trains_the_second},
    {"ViewOfTheInputMadeWithoutGradients",
     [](Scaled& m, const at::Tensor& x) {
       const at::NoGradGuard no_grad;
       const at::Tensor view = x.view({6});
       const at::AutoGradMode grad(true);
       return Tensors{x * m.weight, view};
     },
     [](const Tensors& outputs, std::int64_t /*s*/, StepTensors& /*seen*/) {
       return outputs[0].sum() + outputs[1].detach().sum();
     }},
    {"ViewOfAnOutputMadeWithoutGradients",
     [](Scaled& m, const at::Tensor& x) {
       const at::Tensor y = x * m.weight;
       const at::NoGradGuard no_grad;
       return Tensors{y, y.view({6})};
     },
     [](const Tensors& outputs, std::int64_t /*s*/, StepTensors& /*seen*/) {
       return outputs[0].sum() + outputs[1].detach().sum();
     }},
};

class ReturnedAliasTest : public testing::TestWithParam<AliasCase> {};

TEST_P(ReturnedAliasTest, TrainsAsThePlainProgram) {
  const c10::Device device = find_device("sim");
  Scaled mine(device);
  Scaled plain(device);
  OffloadEngine engine(
      mine, Options(device).min_bytes(16).graph("body").graph_options(GraphOptions().allow_unused_input(true)));
  const auto body = owning([run = GetParam().body](Scaled& model, const at::Tensor& x) { return run(model, x); });
  for (std::int64_t s = 0; s < 5; ++s) {
    expect_same_step(mine, &engine, plain, s, [&](Scaled& model) {
      StepTensors seen;
      const at::Tensor x =
          at::linspace(1, static_cast<double>(2 + s), 6, device).view({2, 3}).clone().requires_grad_(true);
      const at::Tensor given = x * 2;
      const Tensors outputs = call("body", body, model, given);
      if (const at::Tensor loss = GetParam().use(outputs, s, seen); loss.defined()) {
        loss.backward();
      }
      seen.emplace_back("of the input", x.grad());
      return seen;
    });
  }
  EXPECT_GT(engine.report().replays, 0);
}

INSTANTIATE_TEST_SUITE_P(Bodies, ReturnedAliasTest, testing::ValuesIn(alias_cases),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(ReturnedAlias, AHookOnAViewOfAnInputOrAParameterIsRefused) {
  const c10::Device device = find_device("sim");
  for (const bool of_input : {true, false}) {
    Scaled model(device);
    OffloadEngine engine(model, Options(device).min_bytes(16).graph("body"));
    const auto body = owning([of_input](Scaled& m, const at::Tensor& x) {
      const at::Tensor view = (of_input ? x : m.weight).view({6});
      view.register_hook([](const at::Tensor& gradient) { return gradient * 10; });
      return Tensors{x * m.weight, view};
    });
    const auto step = [&] {
      const auto in = engine.step();
      const at::Tensor x = at::ones({2, 3}, device).requires_grad_(true);
      const Tensors outputs = call("body", body, model, x);
      (outputs[0].sum() + outputs[1].sum()).backward();
    };
    EXPECT_THROWS(CaptureError, "on which the call registers a gradient hook", {
      step();
      step();
    });
  }
}

/// The second call may take an output of the first.
class TwoAliasCalls : public testing::Test {
 protected:
  c10::Device device_ = find_device("sim");
  Scaled mine_{device_};
  Scaled plain_{device_};
  OffloadEngine engine_{mine_, Options(device_).min_bytes(16).graph("first").graph("second")};
};

// Both outputs are one memory. Once the program gives the next call the one, and later the other.
TEST_F(TwoAliasCalls, TheOtherOutputOfAMemoryGoesToTheNextCall) {
  const auto first = owning([](Scaled& m, const at::Tensor& x) {
    const at::Tensor y = x * m.weight;
    return Tensors{y, y.view({2, 3})};
  });
  const auto second = owning([](Scaled& m, const at::Tensor& x) { return x * m.weight * 3; });
  for (std::int64_t s = 0; s < 9; ++s) {
    expect_same_step(mine_, &engine_, plain_, s, [&](Scaled& model) {
      const Tensors outputs = call("first", first, model, at::ones({2, 3}, device_));
      at::Tensor loss = call("second", second, model, outputs[s < 3 ? 0 : s < 6 ? 1 : 0]).sum();
      if (s % 2 == 1) {
        loss = loss + outputs[s < 3 ? 1 : 0].square().sum();
      }
      loss.backward();
    });
  }
  EXPECT_GT(engine_.report().replays, 0);
}

TEST_F(TwoAliasCalls, AnOutputThatWasChangedInPlaceGoesToTheNextCallToo) {
  const auto first = owning([](Scaled& m, const at::Tensor& x) { return Tensors{x * m.weight, x + m.weight}; });
  const auto second = owning([](Scaled& m, const at::Tensor& x) { return x * m.weight * 3; });
  for (std::int64_t s = 0; s < 4; ++s) {
    expect_same_step(mine_, &engine_, plain_, s, [&](Scaled& model) {
      const Tensors outputs = call("first", first, model, at::ones({2, 3}, device_));
      at::Tensor other = outputs[1];
      other.relu_();
      (call("second", second, model, other).sum() + outputs[0].sum()).backward();
    });
  }
  EXPECT_EQ(engine_.report().eager_calls, 2);
}

TEST_F(TwoAliasCalls, AnOutputInAnotherShapeIsNotTheOneThatWasGiven) {
  const auto first = owning([](Scaled& m, const at::Tensor& x) { return x * m.weight; });
  const auto second = owning([](Scaled& m, const at::Tensor& x) { return x.matmul(m.weight); });
  for (std::int64_t s = 0; s < 5; ++s) {
    expect_same_step(mine_, &engine_, plain_, s, [&](Scaled& model) {
      at::Tensor h = call("first", first, model, at::full({2, 3}, 1.0 + static_cast<double>(s), device_));
      h.t_();
      call("second", second, model, h).sum().backward();
    });
  }
  EXPECT_GT(engine_.report().replays, 0);
}

// The stride of a dimension of size 1 says nothing.
TEST(ReturnedAlias, AViewOfAnInputMayHaveOtherStridesOfSizeOne) {
  const c10::Device device = find_device("sim");
  Scaled mine(device);
  Scaled plain(device);
  OffloadEngine engine(mine, Options(device).min_bytes(16).graph("body"));
  const auto body = owning([](Scaled& m, const at::Tensor& x) { return Tensors{x * m.weight, x.view({3})}; });
  for (std::int64_t s = 0; s < 5; ++s) {
    expect_same_step(mine, &engine, plain, s, [&](Scaled& model) {
      const at::Tensor x = at::linspace(1, 2, 3, device) + static_cast<double>(s);
      const Tensors outputs = call("body", body, model, s % 2 == 0 ? x.view({1, 3}) : x.view({3, 1}).t());
      (outputs[0].sum() + (outputs[1] * model.weight[0]).sum()).backward();
    });
  }
  EXPECT_EQ(engine.report().eager_calls, 1);
}

// Two parameters of exactly the same memory.
TEST(ReturnedAlias, AViewGivesItsOwnBaseTheGradient) {
  const c10::Device device = find_device("sim");
  struct Tied : torch::nn::Module {
    explicit Tied(c10::Device on) {
      first = register_parameter("first", at::linspace(0.5, 2, 6, c10::TensorOptions(on)).view({2, 3}).clone());
      second = register_parameter("second", at::zeros({2, 3}, on));
      second.set_data(first.detach());
    }
    at::Tensor first, second;
  };
  Tied mine(device);
  Tied plain(device);
  OffloadEngine engine(mine, Options(device).min_bytes(16).graph("body"));
  const auto body = owning([](Tied& m, const at::Tensor& x) { return Tensors{x * m.first, m.second.view({6})}; });
  for (std::int64_t s = 0; s < 4; ++s) {
    for (Tied* const model : {&mine, &plain}) {
      for (at::Tensor& parameter : model->parameters()) {
        parameter.mutable_grad() = at::Tensor();
      }
      in_step(model == &mine ? &engine : nullptr, [&] {
        const Tensors outputs = call("body", body, *model, at::ones({2, 3}, device));
        (outputs[0].sum() + outputs[1].square().sum()).backward();
      });
    }
    ASSERT_TRUE(mine.first.grad().defined() && mine.second.grad().defined());
    EXPECT_TRUE(at::equal(mine.first.grad().cpu(), plain.first.grad().cpu()));
    EXPECT_TRUE(at::equal(mine.second.grad().cpu(), plain.second.grad().cpu()));
  }
  EXPECT_GT(engine.report().replays, 0);
}

TEST(FrozenAfterItsForward, IsRefusedIfTheGraphAddsIntoItsGradient) {
  const c10::Device device = find_device("sim");
  for (const GradientPolicy policy : {GradientPolicy::cloned, GradientPolicy::owned, GradientPolicy::accumulated}) {
    Scaled model(device);
    OffloadEngine engine(
        model, Options(device).min_bytes(16).graph("body").graph_options(GraphOptions().gradients("**", policy)));
    const auto body = owning([](Scaled& m, const at::Tensor& x) { return x * m.weight; });
    const auto run = [&](bool frozen) {
      const auto step = engine.step();
      model.weight.mutable_grad() = at::Tensor();
      const at::Tensor x = at::ones({2, 3}, device).requires_grad_(true);
      const at::Tensor y = call("body", body, model, x);
      model.weight.set_requires_grad(!frozen);
      try {
        y.sum().backward();
      } catch (...) {
        model.weight.set_requires_grad(true);
        throw;
      }
      model.weight.set_requires_grad(true);
      EXPECT_EQ(model.weight.grad().defined(), !frozen);
    };
    for (int s = 0; s < 3; ++s) {
      run(false);
    }
    if (policy == GradientPolicy::accumulated) {
      EXPECT_THROWS(UsageError, "was frozen between the call's forward and its backward", run(true));
    } else {
      run(true);
    }
    run(false);
    EXPECT_GT(engine.report().replays, 0);
  }
}

}  // namespace
}  // namespace sidestream::testing_model
