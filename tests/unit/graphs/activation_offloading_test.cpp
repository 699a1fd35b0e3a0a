// Offload that is switched off, and on again, for modules and scopes: off wins over the options in each way of training.
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "called_stack.h"
#include "expect_throws.h"
#include "models/plain_twin.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_step.h"
#include "sidestream/scope.h"

namespace sidestream::testing_model {
namespace {

constexpr std::int64_t kLayers = 6;
constexpr std::size_t kSwitched = 2;  ///< a layer that is offloaded in each way

enum class Way : std::uint8_t { eager, delayed, graphed, callables, whole_step };
const std::vector<Way> kWays = {Way::eager, Way::delayed, Way::graphed, Way::callables, Way::whole_step};

std::string name_of(const testing::TestParamInfo<Way>& info) {
  return std::vector<std::string>{"Eager", "Delayed", "Graphed", "Callables",
                                  "WholeStep"}[static_cast<std::size_t>(info.param)];
}

Options options_of(Way way, c10::Device device) {
  const Options options = Options(device).offload("layers.*.*").min_bytes(1024).lag(1);
  switch (way) {
    case Way::delayed:
      return Options(options).graph("layers.{1,3,5}").delay("layers.{0,2,4}.*");
    case Way::graphed:
      return Options(options).graph("layers.*");
    case Way::eager:
    case Way::callables:
    case Way::whole_step:
      return options;
  }
  return options;
}

/// A stack that is trained in one of the ways, and its plain twin.
struct SwitchedTraining {
  SwitchedTraining(Way as, const Options& options, const Mlp::Extras& extras = {})
      : way(as),
        device(options.device()),
        mine(device, extras, kLayers),
        plain(device, extras, kLayers),
        engine(mine, options) {}

  void capture(const GraphOptions& graph = {}) {
    if (way == Way::callables) {
      callables = graph_stack(engine, mine.layers, device, graph);
    } else if (way == Way::whole_step) {
      const Callable step("step", owning([this](torch::nn::Module&, const Tensors& inputs) {
                            return Tensors{(mine.forward(inputs[0]) * inputs[1]).mean()};
                          }),
                          std::shared_ptr<torch::nn::Module>(std::shared_ptr<void>(), &mine));
      whole.emplace(make_graphed_step(engine, step, {data(900)}, StepOptions().offload(true)));
    }
  }

  [[nodiscard]] Tensors data(std::int64_t s) const { return {rows(s, device), rows(s, device, 1)}; }
  [[nodiscard]] at::Tensor loss(CalledStack& model, std::int64_t s) const {
    const Tensors inputs = data(s);
    const at::Tensor x = inputs[0].detach().requires_grad_(true);
    return ((&model == &mine && !callables.empty() ? run_stack(callables, x) : model.forward(x)) * inputs[1]).mean();
  }
  void train(std::int64_t first, std::int64_t last) {
    for (std::int64_t s = first; s < last; ++s) {
      expect_same_step(mine, &engine, plain, s, [&](CalledStack& model) {
        if (&model == &mine && whole) {
          (void)(*whole)({data(s)});
        } else {
          loss(model, s).backward();
        }
      });
    }
  }
  /// Offloaded by the plans.
  [[nodiscard]] std::int64_t planned(const std::string& prefix = "") const {
    std::int64_t bytes = 0;
    for (const GroupReport& group : engine.report().groups) {
      bytes += group.name.compare(0, prefix.size(), prefix) == 0 ? group.offloaded_bytes : 0;
    }
    return bytes;
  }
  [[nodiscard]] Mlp& layer(std::size_t i) { return mine.layers->at<Mlp>(i); }

  Way way;
  c10::Device device;
  CalledStack mine, plain;
  OffloadEngine engine;
  std::vector<GraphedCallable> callables;
  std::optional<GraphedStep> whole;
};

class ActivationOffloadingTest : public testing::TestWithParam<Way> {
 protected:
  [[nodiscard]] std::unique_ptr<SwitchedTraining> training() const { return training(options_of(GetParam(), device_)); }
  [[nodiscard]] static std::unique_ptr<SwitchedTraining> training(const Options& options) {
    return std::make_unique<SwitchedTraining>(GetParam(), options);
  }
  c10::Device device_ = find_device("sim");
};
INSTANTIATE_TEST_SUITE_P(Ways, ActivationOffloadingTest, testing::ValuesIn(kWays), name_of);

TEST_P(ActivationOffloadingTest, OffWinsOverThePatternsAndOnAgainTheyHold) {
  const auto of = training();
  of->capture();
  of->train(0, 3);
  const std::int64_t all = of->planned();
  const std::int64_t layer = of->planned("layers.2.");
  ASSERT_GT(layer, 0);
  of->engine.set_activation_offloading(of->layer(kSwitched), false);
  of->train(3, 6);
  EXPECT_EQ(of->planned("layers.2."), 0);
  EXPECT_EQ(of->planned(), all - layer);
  EXPECT_EQ(of->engine.report().offloaded_bytes, all - layer);
  of->engine.set_activation_offloading(of->layer(kSwitched), true);
  of->train(6, 9);
  EXPECT_EQ(of->planned(), all);
  EXPECT_EQ(of->engine.report().offloaded_bytes, all);
  EXPECT_EQ(of->engine.report().refused_bytes, 0);
}

TEST_P(ActivationOffloadingTest, MarkedTensorsStayAndTheReportCountsThem) {
  const auto plain = training();
  plain->capture();
  plain->train(0, 4);
  ASSERT_GT(plain->planned("layers.2.act"), 0);
  SwitchedTraining of(GetParam(), options_of(GetParam(), device_), Mlp::Extras{0, false, true});
  of.capture();
  of.train(0, 4);
  std::int64_t marked = 0;
  for (std::size_t i = 0; i < kLayers; ++i) {
    const std::string group = "layers." + std::to_string(i) + ".act";
    EXPECT_EQ(of.planned(group), 0) << group;
    marked += plain->planned(group);
  }
  std::int64_t saved = 0;
  for (const GroupReport& group : plain->engine.report().groups) {
    saved += group.name.rfind(".act") != std::string::npos ? group.bytes : 0;
  }
  EXPECT_EQ(of.planned(), plain->planned() - marked);
  const Report report = of.engine.report();
  EXPECT_EQ(report.offloaded_bytes, plain->engine.report().offloaded_bytes - marked);
  std::int64_t reported = 0;
  for (const ExclusionReport& exclusion : report.exclusions) {
    reported += exclusion.reason == "marked" ? exclusion.bytes : 0;
  }
  EXPECT_EQ(reported, saved);
}

TEST_P(ActivationOffloadingTest, OffFromTheFirstStepOn) {
  const auto of = training();
  of->engine.set_activation_offloading("layers.2.*,layers.0.act", false);
  of->capture();
  of->train(0, 1);
  const std::int64_t first = of->engine.report().offloaded_bytes;
  of->train(1, 4);
  EXPECT_EQ(of->planned("layers.2."), 0);
  EXPECT_EQ(of->planned("layers.0.act"), 0);
  EXPECT_GT(of->planned("layers.0."), 0);
  of->engine.set_activation_offloading("all", true);
  of->train(4, 5);
  EXPECT_GT(of->engine.report().offloaded_bytes, first) << "the sizing pass offloads what the switch lets it";
}

TEST_P(ActivationOffloadingTest, AStretchOfStepsWithoutOffload) {
  const auto of = training();
  of->capture();
  of->train(0, 3);
  const std::int64_t all = of->planned();
  const std::int64_t replays = of->engine.report().replays;
  of->engine.set_activation_offloading("all", false);
  of->train(3, 6);
  EXPECT_EQ(of->engine.report().offloaded_bytes, 0);
  EXPECT_EQ(of->planned(), 0);
  EXPECT_EQ(of->engine.report().pinned_requested_bytes, 0);
  EXPECT_EQ(of->engine.report().replays, replays) << "graphed calls have captures without copies";
  for (const std::size_t on : {0, 3, 4, 5}) {
    of->engine.set_activation_offloading(of->layer(on), true);
  }
  of->train(6, 9);
  EXPECT_GT(of->planned("layers.0."), 0) << "the later switch holds";
  EXPECT_EQ(of->planned("layers.2."), 0);
  of->engine.set_activation_offloading("all", true);
  of->train(9, 12);
  EXPECT_EQ(of->engine.report().offloaded_bytes, all);
}

TEST_P(ActivationOffloadingTest, ASwitchThatChangesNothingMakesNoCapture) {
  const auto of = training();
  of->engine.set_activation_offloading("layers.0.*", false);
  of->capture();
  of->train(0, 3);
  const std::int64_t captures = of->engine.report().captures;
  const std::int64_t bytes = of->engine.report().offloaded_bytes;
  of->engine.set_activation_offloading("layers.0.*", false);
  of->engine.set_activation_offloading("layers.2.*", true);
  of->train(3, 5);
  EXPECT_EQ(of->engine.report().captures, captures);
  EXPECT_EQ(of->engine.report().offloaded_bytes, bytes);
}

TEST_P(ActivationOffloadingTest, TheReportSaysWhatIsSwitched) {
  const auto of = training();
  const auto notes = [&] {
    std::string all;
    for (const std::string& note : of->engine.report().notes) {
      all += note + "\n";
    }
    return all;
  };
  of->engine.set_activation_offloading(of->mine, false);
  of->engine.set_activation_offloading(of->layer(4), true);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, R"(set_activation_offloading: "**" off, "layers.4.**" on)", notes());
  of->engine.set_activation_offloading("all", true);
  EXPECT_PRED_FORMAT2(testing::IsNotSubstring, "set_activation_offloading", notes());
}

TEST_P(ActivationOffloadingTest, WhatCannotBeSwitchedIsAnErrorThatChangesNothing) {
  std::function<void()> in_capture;
  const auto of = training(options_of(GetParam(), device_).progress([&](const Progress& progress) {
    if (progress.phase == ProgressPhase::capture_forward && in_capture) {
      in_capture();
    }
  }));
  OffloadEngine& engine = of->engine;
  bool refused = false;
  in_capture = [&] {
    EXPECT_THROWS(UsageError, "was called inside a capture", engine.set_activation_offloading("all", false));
    refused = true;
  };
  of->capture();
  of->train(0, 3);
  EXPECT_EQ(refused, GetParam() != Way::eager);
  in_capture = nullptr;
  const std::int64_t all = of->planned();
  Mlp other(kHidden, {});
  EXPECT_THROWS(UsageError, "is not part of the engine's model", engine.set_activation_offloading(other, false));
  EXPECT_THROWS(UsageError, "no scope is named; \"all\"", engine.set_activation_offloading("off", false));
  EXPECT_THROWS(UsageError, "brace", engine.set_activation_offloading("layers.{0", false));
  EXPECT_THROWS(UsageError, "did you mean", engine.set_activation_offloading("layers.0.*,layer.1.*", false));
  {
    auto step = engine.step();
    EXPECT_THROWS(UsageError, "was called inside a step; end the step first",
                  engine.set_activation_offloading("all", false));
    step.finish();
  }
  of->train(3, 5);
  EXPECT_EQ(of->planned(), all);
}

TEST_P(ActivationOffloadingTest, ANameThatTheFirstStepDoesNotMeetIsAnErrorOfTheSecond) {
  const auto of = training();
  of->engine.set_activation_offloading("blocks.0.*", false);
  of->train(0, 1);
  EXPECT_THROWS(UsageError, "name pattern \"blocks.0.*\" matches no scope", (void)of->engine.step());
  of->engine.set_activation_offloading("blocks.0.*", true);
  of->train(1, 3);
}

class SwitchedCallTest : public testing::Test {
 protected:
  c10::Device device_ = find_device("sim");
};

TEST_F(SwitchedCallTest, AModuleThatNoScopeBelongsToIsNamed) {
  SwitchedTraining of(Way::graphed, Options(device_).graph("layers.*").offload("layers.*.*").min_bytes(1024));
  const auto unused = of.mine.register_module("unused", std::make_shared<Mlp>(kHidden, Mlp::Extras{}));
  (void)of.plain.register_module("unused", std::make_shared<Mlp>(kHidden, Mlp::Extras{}));
  of.train(0, 2);
  EXPECT_THROWS(UsageError, "call the module with ss::call, put its code into an OffloadScope, or switch it on again",
                of.engine.set_activation_offloading(*unused, false));
  of.train(2, 4);
}

TEST_F(SwitchedCallTest, AnUnknownNameIsRefusedAlsoAfterAnotherSwitch) {
  SwitchedTraining of(Way::graphed, options_of(Way::graphed, device_));
  of.train(0, 2);
  of.engine.set_activation_offloading(of.layer(kSwitched), false);
  EXPECT_THROWS(UsageError, "\"blocks.0.*\" matches no scope",
                of.engine.set_activation_offloading("blocks.0.*", false));
  of.train(2, 5);
}

TEST_F(SwitchedCallTest, AModuleIsSwitchedUnderEachOfItsNames) {
  SwitchedTraining of(Way::eager, Options(device_).offload("**").min_bytes(1024).lag(1));
  (void)of.mine.register_module("again", of.mine.layers->ptr(0));
  (void)of.plain.register_module("again", of.plain.layers->ptr(0));
  const auto in_scope = [](CalledStack& model, std::int64_t s, c10::Device device) {
    const OffloadScope scope("again");
    return (model.layers->at<Mlp>(0).forward(rows(s, device))).sum();
  };
  const auto train = [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t s = first; s < last; ++s) {
      expect_same_step(of.mine, &of.engine, of.plain, s,
                       [&](CalledStack& model) { (in_scope(model, s, device_) + of.loss(model, s)).backward(); });
    }
  };
  train(0, 3);
  ASSERT_GT(of.planned("again."), 0);
  of.engine.set_activation_offloading(of.layer(0), false);
  train(3, 5);
  EXPECT_EQ(of.planned("again."), 0);
  EXPECT_EQ(of.planned("layers.0."), 0);
  EXPECT_GT(of.planned("layers.2."), 0);
}

TEST_F(SwitchedCallTest, ABackwardOfACallThatIsPendingIsRefused) {
  SwitchedTraining of(Way::graphed, options_of(Way::graphed, device_));
  of.train(0, 3);
  at::Tensor loss;
  in_step(&of.engine, [&] { loss = of.loss(of.mine, 3); });
  of.engine.set_activation_offloading("all", false);
  EXPECT_THROWS(UsageError, "it was reset before this backward; run the backward first", loss.backward());
  of.train(4, 7);
}

TEST_F(SwitchedCallTest, ACallableWithAPendingBackwardReplaysAsCapturedUntilItHasRun) {
  SwitchedTraining of(Way::callables, options_of(Way::callables, device_));
  of.capture();
  of.train(0, 2);
  const std::int64_t captures = of.engine.report().captures;
  expect_same_step(of.mine, nullptr, of.plain, 2, [&](CalledStack& model) {
    at::Tensor h = of.data(2)[0].requires_grad_(true);
    for (std::size_t i = 0; i < of.callables.size(); ++i) {
      h = &model == &of.mine ? of.callables[i]({h})[0] : model.run_layer(i, h);
      if (&model == &of.mine && i == 1) {  // two backwards are pending, and more calls follow
        of.engine.set_activation_offloading(of.layer(kSwitched), false);
      }
    }
    h.mean().backward();
  });
  EXPECT_EQ(of.engine.report().captures, captures);
  of.train(3, 5);
  EXPECT_EQ(of.engine.report().captures, 2 * captures) << "once, before a pass";
  EXPECT_EQ(of.planned("layers.2."), 0);
}

// The option is about weights; a switch is the user's own wish.
TEST_F(SwitchedCallTest, ACallableFollowsTheSwitchAlsoWhereRelocatedWeightsAreErrors) {
  SwitchedTraining of(Way::callables, options_of(Way::callables, device_));
  of.capture(GraphOptions().on_relocated_weights(OnRelocatedWeights::error));
  of.train(0, 2);
  of.engine.set_activation_offloading(of.layer(kSwitched), false);
  of.train(2, 4);
  EXPECT_EQ(of.planned("layers.2."), 0);
  of.engine.set_activation_offloading(of.layer(kSwitched), true);
  relocate(of.mine);
  EXPECT_THROWS(UsageError, "relocated", (void)of.loss(of.mine, 4));
}

TEST_F(SwitchedCallTest, ACallableRunsEagerlyUntilAllRanksCapture) {
  SwitchedTraining of(Way::callables, options_of(Way::callables, device_));
  bool all = true;
  of.capture(GraphOptions().agree_to_capture([&](bool mine) { return mine && all; }));
  of.train(0, 2);
  const std::int64_t captures = of.engine.report().captures;
  of.engine.set_activation_offloading(of.layer(kSwitched), false);
  all = false;
  of.train(2, 3);
  EXPECT_EQ(of.engine.report().captures, captures);
  EXPECT_EQ(of.engine.report().eager_calls, kLayers);
  all = true;
  of.train(3, 5);
  EXPECT_EQ(of.engine.report().captures, 2 * captures);
}

}  // namespace
}  // namespace sidestream::testing_model
