// Options::verify_replays: what it finds, what it says, and whose turn it is.
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include "expect_throws.h"
#include "graphs/engine/engine_access.h"
#include "models/ruled_model.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream::testing_model {
namespace {

class VerifyReplaysTest : public testing::Test {
 protected:
  static constexpr std::int64_t kAlways = 1000;

  [[nodiscard]] Options verifying(std::int64_t replays = kAlways) const {
    return Options(device_).graph("layers.*").verify_replays(replays);
  }
  void make(const RuledLayer::Rule& rule, std::int64_t layers = 1) {
    engine_.reset();
    model_ = std::make_unique<RuledModel>(layers, rule, device_);
  }
  void make(const RuledLayer::Rule& rule, const Options& options, std::int64_t layers = 1) {
    make(rule, layers);
    engine_ = std::make_unique<OffloadEngine>(*model_, options);
  }
  void train(std::int64_t steps = 1) {
    for (std::int64_t s = 0; s < steps; ++s) {
      const auto step = engine_->step();
      model_->forward(at::full({2, RuledLayer::kWidth}, 3.0, device_)).sum().backward();
    }
  }
  /// After two good steps: the message of what verification finds in the third.
  [[nodiscard]] std::string found_after(const std::function<void(RuledLayer&)>& change) {
    train(2);
    EXPECT_EQ(engine_->report().verified_forwards, 1);
    EXPECT_EQ(engine_->report().verified_backwards, 1);
    change(model_->layer(0));
    return message_of<VerificationError>([&] { train(); });
  }

  c10::Device device_ = find_device("sim");
  std::unique_ptr<RuledModel> model_;
  std::unique_ptr<OffloadEngine> engine_;
};

TEST_F(VerifyReplaysTest, FindsAPlainMemberThatHasChanged) {
  make([](RuledLayer& l, const at::Tensor& x) { return x * l.weight * l.member; }, verifying());
  EXPECT_EQ(
      found_after([](RuledLayer& l) { l.member = 2; })
          .rfind("graphed call \"layers.0\": replayed, its output 0 differs first at [0, 0]: 3 replayed, 6 run eagerly "
                 "(8 of 8 elements differ)",
                 0),
      0u);
  model_->layer(0).member = 1;
  train(2);
  EXPECT_EQ(engine_->report().verified_backwards, 3) << "the engine stays usable";
}

TEST_F(VerifyReplaysTest, NamesTheFirstElementThatDiffers) {
  make(
      [](RuledLayer& l, const at::Tensor& x) {
        return x * l.weight * at::where(at::arange(RuledLayer::kWidth, x.options()).eq(2), l.member, 1.0);
      },
      verifying());
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "output 0 differs first at [0, 2]: 3 replayed, 1.5 run eagerly (2 of 8 ",
                      found_after([](RuledLayer& l) { l.member = 0.5; }));
}

TEST_F(VerifyReplaysTest, FindsAHostCounterThatNoGuardSees) {
  make([](RuledLayer& l, const at::Tensor& x) { return x * l.weight * static_cast<double>(l.calls); }, verifying());
  train(1);
  EXPECT_THROWS(VerificationError, "output 0 differs first at [0, 0]", train());
  EXPECT_THROWS(VerificationError, "its changes to other members of the module were not", train());
}

TEST_F(VerifyReplaysTest, FindsAnInputsGradientThatAloneHasChanged) {
  make([](RuledLayer& l, const at::Tensor& x) { return x * l.weight + l.member * (x - x.detach()); }, verifying());
  EXPECT_PRED_FORMAT2(
      testing::IsSubstring,
      "graphed call \"layers.0\": replayed, its gradient of input 0 differs first at [0, 0]: 2 replayed, 4 run "
      "eagerly",
      found_after([](RuledLayer& l) { l.member = 3; }));
  model_->layer(0).member = 1;
  train(2);
}

TEST_F(VerifyReplaysTest, FindsAParametersGradientByItsDottedName) {
  make([](RuledLayer& l, const at::Tensor& x) { return x * l.weight + l.member * (l.extra - l.extra.detach()); },
       verifying());
  EXPECT_PRED_FORMAT2(testing::IsSubstring,
                      "its gradient of layers.0.extra differs first at [0]: 2 replayed, 6 run eagerly (4 of 4",
                      found_after([](RuledLayer& l) { l.member = 3; }));
}

TEST_F(VerifyReplaysTest, FindsAParameterThatTheCaptureDidNotUse) {
  make(
      [](RuledLayer& l, const at::Tensor& x) {
        const at::Tensor y = x * l.weight;
        return l.member > 1 ? y + (l.extra - l.extra.detach()) : y;
      },
      verifying());
  EXPECT_PRED_FORMAT2(testing::IsSubstring,
                      "its gradient of layers.0.extra differs first at [0]: 0 replayed, 2 run eagerly",
                      found_after([](RuledLayer& l) { l.member = 2; }));
}

TEST_F(VerifyReplaysTest, FindsABufferThatIsLeftOtherwise) {
  make(
      [](RuledLayer& l, const at::Tensor& x) {
        const at::NoGradGuard no_grad;
        l.running.add_(x.mean(0), l.member);
        const at::AutoGradMode with_grad(true);
        return x * l.weight;
      },
      verifying());
  EXPECT_PRED_FORMAT2(testing::IsSubstring,
                      "replayed, its buffer layers.0.running differs first at [0]: 9 replayed, 12 run eagerly",
                      found_after([](RuledLayer& l) { l.member = 2; }));
}

TEST_F(VerifyReplaysTest, FindsWhatAGraphAddsIntoItsGradient) {
  make([](RuledLayer& l, const at::Tensor& x) { return x * l.weight + l.member * (l.extra - l.extra.detach()); },
       verifying().graph_options(GraphOptions().gradients("**", GradientPolicy::accumulated)));
  EXPECT_PRED_FORMAT2(
      testing::IsSubstring,
      "its gradient of layers.0.extra (added to what .grad held) differs first at [0]: 6 replayed, 10 run",
      found_after([](RuledLayer& l) { l.member = 3; }));
}

TEST_F(VerifyReplaysTest, FindsTheMemberOfAModuleThatAFunctionCalls) {
  make([](RuledLayer& l, const at::Tensor& x) { return x * l.weight * l.member; });
  OffloadEngine engine(*model_, Options(device_).graph("scaled").verify_replays(kAlways));
  const auto step = [&] {
    const auto active = engine.step();
    call(
        "scaled", [](const at::Tensor& x, RuledLayer& layer) { return layer.forward(x); },
        at::full({2, RuledLayer::kWidth}, 3.0, device_), model_->layer(0))
        .sum()
        .backward();
  };
  step();
  model_->zero_grad();
  step();
  model_->layer(0).member = 2;
  EXPECT_THROWS(VerificationError,
                "graphed call \"scaled\": replayed, its output 0 differs first at [0, 0]: 3 replayed, 6", step());
}

TEST_F(VerifyReplaysTest, OneTensorAsTwoArgumentsIsOneInput) {
  make([](RuledLayer& l, const at::Tensor& x) { return x * l.weight; });
  OffloadEngine engine(*model_, Options(device_).graph("joined").verify_replays(kAlways));
  for (std::int64_t s = 0; s < 3; ++s) {
    const auto active = engine.step();
    const at::Tensor leaf = at::full({2, RuledLayer::kWidth}, 3.0, device_).requires_grad_();
    for (const at::Tensor& x : {leaf, leaf * 2}) {
      call(
          "joined",
          [](RuledLayer& layer, const at::Tensor& a, const at::Tensor& b) { return layer.forward(a) + b * b; },
          model_->layer(0), x, x)
          .sum()
          .backward();
    }
    EXPECT_TRUE(leaf.grad().equal(at::full_like(leaf, 1 + 6 + 2 * (1 + 12)))) << leaf.grad();
  }
  EXPECT_EQ(engine.report().verified_backwards, 2);
}

// The graph reads a dense copy, and so does the run that it is compared with: a sum may add the one in another order than the other.
TEST_F(VerifyReplaysTest, AnInputThatIsNotDenseIsReadAsTheGraphReadsIt) {
  make([](RuledLayer& l, const at::Tensor& x) { return x * l.weight; });
  OffloadEngine engine(*model_, Options(device_).graph("summed").verify_replays(kAlways));
  for (std::int64_t s = 0; s < 4; ++s) {
    const at::Tensor row = (at::arange(1, 98, at::kFloat) * 0.37F + static_cast<float>(s)).sin().to(device_);
    const auto active = engine.step();
    call(
        "summed",
        [](RuledLayer& layer, const at::Tensor& wide) { return (wide.sum() + wide.sum(0).sum() * 0.1) * layer.weight; },
        model_->layer(0), row.expand({53, 97}))
        .sum()
        .backward();
  }
  EXPECT_EQ(engine.report().verified_backwards, 3);
}

TEST_F(VerifyReplaysTest, DifferencesWithinTheToleranceAreNone) {
  const auto rule = [](RuledLayer& l, const at::Tensor& x) { return x * l.weight * l.member; };
  make(rule, verifying().verify_tolerance(1e-3));
  train(2);
  model_->layer(0).member = 1.0005;
  train();
  EXPECT_EQ(engine_->report().verified_backwards, 2);
  at::globalContext().setDeterministicAlgorithms(true, false);
  train(2);  // another capture, of these modes
  model_->layer(0).member = 1.0006;
  EXPECT_THROWS(VerificationError, "output 0 differs", train()) << "bit for bit where operators are deterministic";
  at::globalContext().setDeterministicAlgorithms(false, false);
  model_->layer(0).member = 1.002;
  EXPECT_THROWS(VerificationError, "output 0 differs", train());
  make(rule, verifying());
  train(2);
  model_->layer(0).member = 1.0005;
  EXPECT_THROWS(VerificationError, "output 0 differs", train());
}

TEST_F(VerifyReplaysTest, OneCallAStepAndEachInItsTurn) {
  make([](RuledLayer& l, const at::Tensor& x) { return x * l.weight; }, verifying(2).verify_every(0), 3);
  train();
  const auto eager_runs = [&] {
    std::vector<std::int64_t> runs;
    for (std::int64_t i = 0; i < 3; ++i) {
      runs.push_back(std::exchange(model_->layer(i).calls, 0));
    }
    return runs;
  };
  (void)engine_->step();  // warms up and captures
  (void)eager_runs();
  using Runs = std::vector<std::int64_t>;
  for (const Runs& expected : {Runs{1, 0, 0}, {0, 1, 0}, {0, 0, 1}, {1, 0, 0}, {0, 1, 0}, {0, 0, 1}, {0, 0, 0}}) {
    train();
    EXPECT_EQ(eager_runs(), expected);
  }
  EXPECT_EQ(engine_->report().verified_forwards, 6);
  EXPECT_EQ(engine_->report().verified_backwards, 6);
}

/// Behind a node: where the first gradient that it made lies.
class WhereItLies final : public torch::autograd::FunctionPostHook {
 public:
  explicit WhereItLies(const void*& address) : address_(address) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& results,
                                            const torch::autograd::variable_list& /*grads*/) override {
    address_ = results.at(0).const_data_ptr();
    return results;
  }

 private:
  const void*& address_;
};

TEST_F(VerifyReplaysTest, GradientsBetweenCallsGoOnWithoutACopyAsInOtherSteps) {
  make([](RuledLayer& l, const at::Tensor& x) { return (x * l.weight).sin(); }, verifying(), 2);
  train(2);
  const auto& layers = EngineAccess::state(*engine_).sequences().all()[0].lock()->captured().calls;
  for (int s = 0; s < 4; ++s) {
    const void* handed_on = nullptr;
    const auto step = engine_->step();
    const at::Tensor y = model_->forward(at::full({2, RuledLayer::kWidth}, 3.0, device_));
    y.grad_fn()->add_post_hook(std::make_unique<WhereItLies>(handed_on));
    y.sum().backward();
    EXPECT_EQ(handed_on, layers[1].inputs[0].grad.const_data_ptr()) << "step " << s;
  }
  EXPECT_EQ(engine_->report().verified_backwards, 5);
}

TEST_F(VerifyReplaysTest, ThenOneReplayInSoMany) {
  make([](RuledLayer& l, const at::Tensor& x) { return x * l.weight; }, verifying(2).verify_every(3));
  train();
  std::vector<std::int64_t> verified;
  for (std::int64_t s = 0; s < 9; ++s) {
    train();
    verified.push_back(engine_->report().verified_backwards);
  }
  EXPECT_EQ(verified, (std::vector<std::int64_t>{1, 2, 2, 2, 3, 3, 3, 4, 4}));
}

TEST_F(VerifyReplaysTest, ACaptureThatTookAnothersPlaceIsVerifiedAnew) {
  make([](RuledLayer& l, const at::Tensor& x) { return x * l.weight; }, verifying(1).verify_every(0));
  train(4);
  EXPECT_EQ(engine_->report().verified_backwards, 1);
  model_->layer(0).weight.set_data(model_->layer(0).weight.detach().clone());
  train(3);
  EXPECT_EQ(engine_->report().verified_backwards, 2);
}

TEST_F(VerifyReplaysTest, WhereNothingIsAskedForNothingRunsEagerly) {
  make([](RuledLayer& l, const at::Tensor& x) { return x * l.weight; }, Options(device_).graph("layers.*"));
  train(1);
  (void)engine_->step();
  const std::int64_t before = model_->layer(0).calls;
  train(3);
  EXPECT_EQ(model_->layer(0).calls, before);
  EXPECT_EQ(engine_->report().verified_forwards, 0);
}

TEST_F(VerifyReplaysTest, TheEagerRunIsLetGoAtTheStepsEndWhereNoBackwardCame) {
  const sim::OneThread one_thread;  // autograd's own frees the last tensors of a backward a moment later
  const auto growth = [&](const Options& options) {
    make([](RuledLayer& l, const at::Tensor& x) { return (x * l.weight).exp().sin().exp().sin(); }, options);
    const at::Tensor x = at::ones({1 << 14, RuledLayer::kWidth}, device_);
    for (int s = 0; s < 3; ++s) {
      const auto step = engine_->step();
      model_->forward(x).sum().backward();
    }
    at::Tensor loss;
    std::int64_t inside = 0;
    {
      const auto step = engine_->step();
      loss = model_->forward(x).sum();
      inside = memory_use(device_).allocated;
    }
    return inside - memory_use(device_).allocated;
  };
  const std::int64_t one = (1 << 14) * RuledLayer::kWidth * 4;
  const std::int64_t verified = growth(verifying());
  EXPECT_EQ(engine_->report().verified_forwards, 3);
  EXPECT_EQ(engine_->report().verified_backwards, 2);
  EXPECT_GE(verified - growth(Options(device_).graph("layers.*")), 3 * one);
}

TEST_F(VerifyReplaysTest, WhatTheEagerRunThrowsComesOutAndLeavesNothing) {
  make(
      [](RuledLayer& l, const at::Tensor& x) {
        const at::NoGradGuard no_grad;
        l.running.add_(1);
        l.unregistered.add_(1);
        if (l.member > 1) {
          throw std::runtime_error("the data broke");
        }
        const at::AutoGradMode with_grad(true);
        return x * l.weight;
      },
      verifying());
  train(2);
  const auto sums = [&] {
    RuledLayer& layer = model_->layer(0);
    return std::make_tuple(layer.running.sum().item<double>(), layer.unregistered.sum().item<double>());
  };
  const auto before = sums();
  model_->layer(0).member = 2;
  EXPECT_THROWS(std::runtime_error, "the data broke", train());
  EXPECT_EQ(sums(), before);
  model_->layer(0).member = 1;
  train();
  EXPECT_EQ(engine_->report().verified_backwards, 2);
}

TEST_F(VerifyReplaysTest, CallablesAreVerifiedInAndOutOfSteps) {
  make([](RuledLayer& l, const at::Tensor& x) { return x * l.weight + l.member * (l.extra - l.extra.detach()); }, 2);
  OffloadEngine engine(*model_, Options(device_).verify_replays(2).verify_every(0));
  const at::Tensor sample = at::full({2, RuledLayer::kWidth}, 3.0, device_).requires_grad_(true);
  std::vector<Callable> callables;
  for (std::int64_t i = 0; i < 2; ++i) {
    const auto layer = model_->layers->ptr<RuledLayer>(static_cast<std::size_t>(i));
    callables.emplace_back(
        "layers." + std::to_string(i), [](RuledLayer& of, const Tensors& in) { return Tensors{of.forward(in[0])}; },
        layer);
  }
  auto layers = make_graphed_callables(engine, callables, {{sample}, {Sample::output_of(0)}});
  const auto run = [&] { layers[1](layers[0]({sample}))[0].sum().backward(); };
  for (int i = 0; i < 3; ++i) {
    run();
  }
  EXPECT_EQ(engine.report().verified_backwards, 3) << "one at a time";
  for (int i = 0; i < 3; ++i) {
    const auto step = engine.step();
    run();
  }
  EXPECT_EQ(engine.report().verified_backwards, 4);
  OffloadEngine always(*model_, Options(device_).verify_replays(kAlways));
  layers = make_graphed_callables(always, callables, {{sample}, {Sample::output_of(0)}});
  model_->layer(0).member = 2;
  EXPECT_THROWS(VerificationError, "gradient of layers.0.extra", run());
}

/// An environment variable for a test's time.
class InEnvironment {
 public:
  InEnvironment(const char* name, const char* value) : name_(name) { setenv(name_, value, 1); }
  InEnvironment(const InEnvironment&) = delete;
  InEnvironment& operator=(const InEnvironment&) = delete;
  ~InEnvironment() { unsetenv(name_); }

 private:
  const char* name_;
};

TEST_F(VerifyReplaysTest, TheEnvironmentTurnsItOn) {
  const auto rule = [](RuledLayer& l, const at::Tensor& x) { return x * l.weight * l.member; };
  const InEnvironment replays("SIDESTREAM_VERIFY_REPLAYS", "3");
  make(rule, Options(device_).graph("layers.*"));
  train(2);
  EXPECT_EQ(engine_->report().verified_backwards, 1);
  model_->layer(0).member = 1.0005;
  EXPECT_THROWS(VerificationError, "output 0", train());
  const InEnvironment tolerance("SIDESTREAM_VERIFY_TOLERANCE", "1e-3");
  make(rule, Options(device_).graph("layers.*"));
  train(2);
  model_->layer(0).member = 1.0005;
  train();
  EXPECT_EQ(engine_->report().verified_backwards, 2);
}

TEST_F(VerifyReplaysTest, OptionsThatMakeNoSenseAreRefused) {
  make([](RuledLayer& l, const at::Tensor& x) { return x * l.weight; });
  const auto refused = [&](const Options& options) {
    return message_of<UsageError>([&] { OffloadEngine(*model_, options); });
  };
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "verify_replays is negative", refused(Options(device_).verify_replays(-1)));
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "verify_every is negative", refused(Options(device_).verify_every(-1)));
  for (const double wrong : {-1.0, 1.0, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "verify_tolerance is", refused(Options(device_).verify_tolerance(wrong)));
  }
  for (const char* wrong : {"many", "-1", "3x", "99999999999999999999"}) {
    const InEnvironment replays("SIDESTREAM_VERIFY_REPLAYS", wrong);
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "SIDESTREAM_VERIFY_REPLAYS is", refused(Options(device_)));
  }
  for (const char* wrong : {"little", "-1", "1", "nan"}) {
    const InEnvironment tolerance("SIDESTREAM_VERIFY_TOLERANCE", wrong);
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "SIDESTREAM_VERIFY_TOLERANCE is", refused(Options(device_)));
  }
}

}  // namespace
}  // namespace sidestream::testing_model
