// Bodies that draw from generators of their own: named, each replay draws on from them as plain calls do.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/Generator.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>

#include "expect_throws.h"
#include "models/body_model.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/graphed_step.h"
#include "sidestream/owning.h"

namespace sidestream::testing_model {
namespace {

at::Tensor dropped_by(const at::Tensor& x, const at::Generator& generator) {
  return x * at::empty_like(x).bernoulli_(0.75, generator).div_(0.75);
}

/// Adds noise to the gradient that passes it.
class DrawnGradient final : public torch::autograd::Function<DrawnGradient> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, at::Generator generator) {
    context->saved_data["generator"] = std::move(generator);
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const at::Generator generator = context->saved_data["generator"].toGenerator();
    return {grads[0] + at::rand(grads[0].sizes(), generator, grads[0].options()), at::Tensor()};
  }
};

at::Tensor squashed_product(BodyBlock& block, const at::Tensor& x) { return at::matmul(x, block.weight).tanh(); }

class NamedGeneratorsTest : public testing::Test {
 protected:
  /// Two generators, the same each time.
  struct Pair {
    at::Generator first;
    at::Generator second;
    [[nodiscard]] std::vector<at::Generator> both() const { return {first, second}; }
  };
  [[nodiscard]] Pair made() const {
    Pair pair{default_generator().clone(), default_generator().clone()};
    pair.first.set_current_seed(31);
    pair.second.set_current_seed(32);
    return pair;
  }
  [[nodiscard]] at::Generator default_generator() const { return at::globalContext().defaultGenerator(device_); }
  [[nodiscard]] Options naming(const std::vector<at::Generator>& generators) const {
    return Options(device_).graph("blocks.*").min_bytes(256).graph_options(GraphOptions().generators(generators));
  }
  static std::vector<BodyBlock::Body> bodies(const Pair& pair) {
    return {[pair](BodyBlock& block, const at::Tensor& x) {
              return at::dropout(dropped_by(squashed_product(block, x), pair.first), 0.25, true);
            },
            [pair](BodyBlock& block, const at::Tensor& x) {
              return DrawnGradient::apply(dropped_by(dropped_by(squashed_product(block, x), pair.second), pair.first),
                                          pair.second);
            }};
  }
  /// Both models, each with generators of its own, train alike, and all generators stand alike behind each step.
  void expect_trains(const Options& options, const Pair& mine) const {
    const Pair plain = made();
    BodyModel graphed(device_, bodies(mine));
    BodyModel twin(device_, bodies(plain));
    OffloadEngine engine(graphed, options);
    for (std::int64_t s = 0; s < 6; ++s) {
      const StepTensors steps = graphed.step(&engine, s);
      const at::Tensor drawn_on = default_generator().get_state();
      EXPECT_TRUE(same(steps, twin.step(nullptr, s))) << "step " << s;
      EXPECT_TRUE(at::equal(drawn_on, default_generator().get_state())) << "step " << s;
      EXPECT_TRUE(at::equal(mine.first.get_state(), plain.first.get_state())) << "step " << s;
      EXPECT_TRUE(at::equal(mine.second.get_state(), plain.second.get_state())) << "step " << s;
    }
    EXPECT_GT(engine.report().replays, 0);
    if (options.verify_replays() > 0) {
      EXPECT_GT(engine.report().verified_backwards, 0);
    }
  }
  static Tensors twice(const Tensors& in, const at::Generator& generator) {
    return {dropped_by(in[0].tanh(), generator) + dropped_by(in[0], generator)};
  }

  c10::Device device_ = find_device("sim");
};

TEST_F(NamedGeneratorsTest, ReplaysDrawOnAsPlainCallsDo) {
  const Pair mine = made();
  expect_trains(naming(mine.both()), mine);
}

TEST_F(NamedGeneratorsTest, OffloadedReplaysDrawOnAsPlainCallsDo) {
  const Pair mine = made();
  expect_trains(naming(mine.both()).offload("blocks.*"), mine);
}

TEST_F(NamedGeneratorsTest, VerifiedReplaysDrawOnAsPlainCallsDo) {
  const Pair mine = made();
  expect_trains(naming(mine.both()).verify_replays(100), mine);
}

TEST_F(NamedGeneratorsTest, AVerifiedBackwardThatDrawsFromTheDefaultOneDrawsAsItsReplayDoes) {
  const auto body = [generator = default_generator()](BodyBlock& block, const at::Tensor& x) {
    return DrawnGradient::apply(squashed_product(block, x), generator);
  };
  BodyTwins twins(device_, {body, body});
  OffloadEngine engine(twins.mine, naming({}).verify_replays(100));
  twins.expect_plain(engine, 0, 6);
  EXPECT_GT(engine.report().verified_backwards, 0);
}

TEST_F(NamedGeneratorsTest, NamedTwiceAndBesideTheDefaultOneTheyAreTheSame) {
  const Pair mine = made();
  expect_trains(naming({mine.second, default_generator(), mine.first, mine.second}), mine);
}

TEST_F(NamedGeneratorsTest, WarmUpAndCaptureLeaveThemWhereTheyStood) {
  const Pair mine = made();
  torch::nn::Module model;
  OffloadEngine engine(model, Options(device_).min_bytes(256));
  const std::vector<at::Tensor> before{mine.first.get_state(), mine.second.get_state()};
  const at::Tensor x = at::ones({4, 8}, device_).requires_grad_(true);
  auto graphed = make_graphed_callables(
      engine, {Callable("both", owning([mine](const Tensors& in) {
                          return Tensors{dropped_by(in[0], mine.first) + dropped_by(in[0], mine.second)};
                        }))},
      {{x}}, GraphOptions().generators(mine.both()));
  EXPECT_TRUE(at::equal(mine.first.get_state(), before[0]));
  EXPECT_TRUE(at::equal(mine.second.get_state(), before[1]));
  (void)graphed[0]({x});
  EXPECT_FALSE(at::equal(mine.first.get_state(), before[0]));
  EXPECT_FALSE(at::equal(mine.second.get_state(), before[1]));
}

TEST_F(NamedGeneratorsTest, ACallableHasGeneratorsOfItsOwn) {
  const Pair mine = made();
  const Pair plain = made();
  torch::nn::Module model;
  OffloadEngine engine(model, Options(device_).min_bytes(256));
  const at::Tensor x = at::ones({4, 8}, device_).requires_grad_(true);
  std::vector<Callable> callables{
      Callable("one", owning([mine](const Tensors& in) { return twice(in, mine.first); })).generators({mine.first}),
      Callable("two", owning([mine](const Tensors& in) { return twice(in, mine.second); })).generators({mine.second})};
  auto graphed = make_graphed_callables(engine, callables, {{x}, {Sample::output_of(0)}});
  for (int s = 0; s < 3; ++s) {
    const at::Tensor out = graphed[1](graphed[0]({x}))[0];
    const at::Tensor expected = twice(twice({x}, plain.first), plain.second)[0];
    EXPECT_TRUE(at::equal(out.cpu(), expected.cpu())) << s;
    EXPECT_TRUE(at::equal(torch::autograd::grad({out.sum()}, {x})[0].cpu(),
                          torch::autograd::grad({expected.sum()}, {x})[0].cpu()))
        << s;
  }
  EXPECT_TRUE(at::equal(mine.first.get_state(), plain.first.get_state()));
  EXPECT_TRUE(at::equal(mine.second.get_state(), plain.second.get_state()));
  callables[1].generators({});
  EXPECT_THROWS(CaptureError, "\"two\": it draws from a generator of its own (aten::bernoulli_",
                (void)make_graphed_callables(engine, callables, {{x}, {Sample::output_of(0)}}));
}

TEST_F(NamedGeneratorsTest, AGraphKeepsTheGeneratorsThatItDrawsFrom) {
  torch::nn::Module model;
  OffloadEngine engine(model, Options(device_).min_bytes(256));
  const at::Tensor x = at::ones({4, 8}, device_).requires_grad_(true);
  const Pair plain = made();
  std::vector<GraphedCallable> graphed;
  {
    const Pair mine = made();
    graphed = make_graphed_callables(
        engine, {Callable("one", owning([mine](const Tensors& in) { return twice(in, mine.first); }))}, {{x}},
        GraphOptions().generators(mine.both()));
  }
  for (int s = 0; s < 2; ++s) {
    EXPECT_TRUE(at::equal(graphed[0]({x})[0].cpu(), twice({x}, plain.first)[0].cpu())) << s;
  }
}

TEST_F(NamedGeneratorsTest, AWholeStepDrawsOnFromThem) {
  const Pair mine = made();
  const Pair plain = made();
  const auto loss_of = [](const at::Tensor& x, const at::Tensor& weight, const Pair& pair) {
    return dropped_by(at::matmul(dropped_by(x, pair.first), weight), pair.second).square().sum();
  };
  struct Weights : torch::nn::Module {
    explicit Weights(c10::Device device) {
      weight = register_parameter("weight", at::full({8, 8}, 0.25, device).requires_grad_(true));
    }
    at::Tensor weight;
  };
  const auto model = std::make_shared<Weights>(device_);
  const auto twin = std::make_shared<Weights>(device_);
  OffloadEngine engine(*model, Options(device_));
  const at::Tensor x = at::ones({4, 8}, device_);
  auto step = make_graphed_step(engine,
                                Callable("step", owning([=](Weights& weights, const Tensors& in) {
                                           return Tensors{loss_of(in[0], weights.weight, mine)};
                                         }),
                                         model)
                                    .generators({mine.second}),
                                {{x}, {x}}, StepOptions().graph(GraphOptions().generators({mine.first})));
  for (int s = 0; s < 3; ++s) {
    (void)step({{x}, {x}});
    twin->weight.mutable_grad() = at::Tensor();
    for (int m = 0; m < 2; ++m) {
      loss_of(x, twin->weight, plain).backward();
    }
    EXPECT_TRUE(at::equal(model->weight.grad().cpu(), twin->weight.grad().cpu())) << s;
  }
  EXPECT_TRUE(at::equal(mine.first.get_state(), plain.first.get_state()));
  EXPECT_TRUE(at::equal(mine.second.get_state(), plain.second.get_state()));
}

TEST_F(NamedGeneratorsTest, OneThatIsNotNamedIsRefusedAndStandsWhereItStood) {
  const Pair mine = made();
  BodyModel model(device_, bodies(mine));
  OffloadEngine engine(model, naming({mine.first}));
  (void)model.step(&engine, 0);
  const std::vector<at::Tensor> before{mine.first.get_state(), mine.second.get_state()};
  const std::string message = message_of<CaptureError>([&] { (void)engine.step(); });
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "\"blocks.1\": it draws from a generator of its own (aten::rand)", message);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "Name it in GraphOptions::generators", message);
  EXPECT_TRUE(at::equal(mine.first.get_state(), before[0]));
  EXPECT_TRUE(at::equal(mine.second.get_state(), before[1]));
}

TEST_F(NamedGeneratorsTest, OneOfTheCpuIsRefusedAndStandsWhereItStood) {
  const at::Generator mine = at::detail::createCPUGenerator(57);
  BodyModel model(device_, {[mine](BodyBlock& block, const at::Tensor& x) {
                    return squashed_product(block, x) * at::rand({1}, mine).to(x.device());
                  }});
  OffloadEngine engine(model, naming({}));
  (void)model.step(&engine, 0);
  const at::Tensor before = mine.get_state();
  EXPECT_THROWS(CaptureError, "\"blocks.0\": it draws random numbers on the CPU (aten::rand", (void)engine.step());
  EXPECT_TRUE(at::equal(mine.get_state(), before));
}

TEST_F(NamedGeneratorsTest, AGeneratorOfAnotherDeviceIsRefused) {
  const Pair mine = made();
  BodyModel model(device_, bodies(mine));
  for (const at::Generator& wrong : {at::detail::createCPUGenerator(), at::Generator()}) {
    OffloadEngine engine(model, naming({mine.first, wrong, mine.second}));
    (void)model.step(&engine, 0);
    EXPECT_THROWS(UsageError, wrong.defined() ? "a generator of cpu is named" : "named for it is undefined",
                  (void)engine.step());
  }
}

TEST_F(NamedGeneratorsTest, ASeedInsideIsRefused) {
  const Pair mine = made();
  BodyModel model(device_, {[mine](BodyBlock& block, const at::Tensor& x) {
                    at::Generator generator = mine.first;
                    generator.set_current_seed(77);
                    return dropped_by(squashed_product(block, x), generator);
                  }});
  OffloadEngine engine(model, naming(mine.both()));
  (void)model.step(&engine, 0);
  EXPECT_THROWS(CaptureError, "\"blocks.0\": it seeds a generator that GraphOptions::generators", (void)engine.step());
}

}  // namespace
}  // namespace sidestream::testing_model
