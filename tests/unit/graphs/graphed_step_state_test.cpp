// What a whole step leaves behind, and what it keeps: tensors of modules, versions, gradients, journals, verification.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/utils.h>
#include <nlohmann/json.hpp>

#include "eventually.h"
#include "expect_throws.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/owning.h"
#include "unit/graphs/called_stack.h"
#include "unit/graphs/graphed_step_fixture.h"

namespace sidestream::testing_model {
namespace {

class WholeStepStateTest : public testing::Test {
 protected:
  static constexpr std::int64_t kStateSteps = 4;

  /// Each step of a training with `options` is plain training's.
  void expect_plain(WholeStepTrainer& mine, bool in_steps) const {
    WholeStepTrainer plain(device_, mine.form);
    for (std::int64_t s = 0; s < kStateSteps; ++s) {
      torch::manual_seed(40 + s);
      const auto got = [&] {
        if (!in_steps) {
          return mine.run(s);
        }
        Step step = mine.engine->step();
        auto result = mine.run(s);
        step.finish();
        return result;
      }();
      torch::manual_seed(40 + s);
      EXPECT_TRUE(same(got, plain.run(s))) << "step " << s;
    }
  }

  c10::Device device_ = find_device("sim");
};

/// Its layers are graphed calls, or callables once there are some.
class StackOfCallables : public CalledStack {
 public:
  using CalledStack::CalledStack;
  static Tensors loss(StackOfCallables& stack, const Tensors& inputs) {
    at::Tensor h = inputs[0];
    for (std::size_t i = 0; i < stack.layers->size(); ++i) {
      h = stack.callables.empty() ? stack.run_layer(i, h) : stack.callables[i]({h})[0];
    }
    return {h.square().mean()};
  }
  std::vector<GraphedCallable> callables;
};

struct LayersInAStep {
  GradientPolicy policy;
  bool callables;
};

/// Autograd is asked for the gradients of a whole step. Gradients that a graph adds or delays would be missing.
class LayersInAStepTest : public testing::TestWithParam<LayersInAStep> {};

TEST_P(LayersInAStepTest, ReplayBesideTheStepButNotInIt) {
  const c10::Device device = find_device("sim");
  const auto model = std::make_shared<StackOfCallables>(device);
  const auto plain = std::make_shared<StackOfCallables>(device);
  const GraphOptions options = GraphOptions().gradients("**", GetParam().policy);
  Options of_engine = Options(device).min_bytes(256).graph_options(options);
  OffloadEngine engine(*model, GetParam().callables ? of_engine : of_engine.graph("layers.*"));
  if (GetParam().callables) {
    std::vector<Callable> layers;
    for (std::size_t i = 0; i < model->layers->size(); ++i) {
      layers.emplace_back(
          "layers." + std::to_string(i),
          [](Mlp& layer, const Tensors& in) -> Tensors { return {layer.forward(in[0])}; }, model->layers->ptr<Mlp>(i));
    }
    std::vector<std::vector<Sample>> samples(layers.size(), {Sample(rows(50, device).requires_grad_(true))});
    samples[0] = {Sample(rows(50, device))};
    model->callables = make_graphed_callables(engine, std::move(layers), samples, options);
  }
  GraphedStep step = make_graphed_step(engine, Callable("step", &StackOfCallables::loss, model), {{rows(51, device)}});
  const auto run = [&](StackOfCallables& stack, std::int64_t s) {
    const bool graphed = &stack == model.get();
    if (s >= 3 && graphed) {
      stack.layers->at<Mlp>(2).train(s != 4);  // another flag than in the capture: the step runs eagerly
      (void)step({{rows(s, device)}});
      stack.train();
      return;
    }
    StackOfCallables::loss(stack, {rows(s, device)})[0].backward();
    if (graphed) {
      engine.backward_dw();
    }
  };
  for (std::int64_t s = 0; s < 6; ++s) {
    expect_same_step(*model, &engine, *plain, s, [&](StackOfCallables& stack) { run(stack, s); });
  }
  model->callables.clear();
}

INSTANTIATE_TEST_SUITE_P(
    Policies, LayersInAStepTest,
    testing::Values(LayersInAStep{GradientPolicy::cloned, false}, LayersInAStep{GradientPolicy::accumulated, false},
                    LayersInAStep{GradientPolicy::delayed, false}, LayersInAStep{GradientPolicy::owned, true},
                    LayersInAStep{GradientPolicy::accumulated, true}, LayersInAStep{GradientPolicy::delayed, true}));

/// Keeps what its forward made in a member.
class StepKeepingModel : public torch::nn::Module {
 public:
  StepKeepingModel() : weight_(register_parameter("weight", at::full({32}, 0.5))) {}
  static Tensors loss(StepKeepingModel& model, const Tensors& inputs) {
    const at::Tensor y = inputs[0] * model.weight_;
    model.kept = (y * 2).detach();
    return {(y * inputs[1]).sum()};
  }
  at::Tensor kept;

 private:
  at::Tensor weight_;
};

TEST_F(WholeStepStateTest, WhatAModuleKeepsHasAValueAndFollowsReplays) {
  auto model = std::make_shared<StepKeepingModel>();
  model->to(device_);
  AdamW optimizer(model->parameters(), 0.1);
  OffloadEngine engine(*model, Options(device_));
  const Tensors sample{rows(50, device_), rows(51, device_)};
  GraphedStep step = make_graphed_step(engine, Callable("step", &StepKeepingModel::loss, model), {sample},
                                       StepOptions().update([&] { optimizer.step(); }));
  EXPECT_TRUE(at::equal(model->kept.cpu(), sample[0].cpu()));  // 2 * 0.5 * x
  EXPECT_TRUE(at::equal(model->parameters()[0].detach().cpu(), at::full({32}, 0.5)));
  EXPECT_EQ(optimizer.state()[0].step.cpu().item<float>(), 0);
  const Tensors inputs{rows(52, device_), rows(53, device_)};
  (void)step({inputs});
  EXPECT_TRUE(at::equal(model->kept.cpu(), inputs[0].cpu()));
  EXPECT_EQ(optimizer.state()[0].step.cpu().item<float>(), 1);
}

TEST_F(WholeStepStateTest, TrainsInsideOfStepsThatAreChecked) {
  WholeStepTrainer mine(device_, {.layers = 4, .microbatches = 2, .updates = true});
  mine.graph(Options(device_).offload("**").min_bytes(1024).check_steps(true));
  expect_plain(mine, /*in_steps=*/true);
  EXPECT_EQ(mine.engine->report().steps, kStateSteps);
}

TEST_F(WholeStepStateTest, ReportsWhatLeavesAndWhatStays) {
  WholeStepTrainer mine(device_, {.layers = 4, .microbatches = 2});
  mine.graph(Options(device_).offload("fc1").min_bytes(1024));
  const auto each = static_cast<std::int64_t>(mine.step->offloaded_bytes());
  EXPECT_GT(each, 0);
  (void)mine.run(0);
  EXPECT_EQ(mine.engine->report().offloaded_bytes, each);
  const std::int64_t back = mine.engine->report().reloaded_bytes;  // the last are used before they are let go of
  EXPECT_GT(back, 0);
  EXPECT_LE(back, each);
  {
    Step step = mine.engine->step();
    (void)mine.run(1);
    (void)mine.run(2);
    step.finish();
  }
  const Report report = mine.engine->report();
  EXPECT_EQ(report.offloaded_bytes, 2 * each);
  EXPECT_EQ(report.reloaded_bytes, 2 * back);
  std::int64_t planned = 0;
  bool stays = false;
  for (const GroupReport& group : report.groups) {
    planned += group.offloaded_bytes;
    stays = stays || group.kept_because == "not selected";
  }
  EXPECT_EQ(planned, each);
  EXPECT_TRUE(stays);
  mine.step->reset();
  EXPECT_EQ(mine.engine->report().groups.size(), 0U);
}

TEST_F(WholeStepStateTest, IsOneBarOfATraceInsideOfAnEngineStepOnly) {
  WholeStepTrainer mine(device_, {.layers = 4, .microbatches = 2});
  mine.graph(Options(device_).offload("fc1").min_bytes(1024));
  for (std::int64_t s = 0; s < kStateSteps; ++s) {
    (void)mine.run(s);
  }
  EXPECT_EQ(mine.engine->report().traced_step, 0);
  EXPECT_TRUE(mine.engine->report().times.empty());
  EXPECT_THROWS(UsageError, "only if it is called inside of OffloadEngine::step", (void)mine.engine->trace_json());
  for (std::int64_t s = 0; s < kStateSteps; ++s) {
    const Step step = mine.engine->step();
    (void)mine.run(s);
  }
  const Report report = mine.engine->report();
  EXPECT_GT(report.traced_step, 0);
  ASSERT_FALSE(report.times.empty());
  EXPECT_EQ(report.times.front().name, mine.step->name());
  std::vector<std::string> bars;
  const nlohmann::json trace = nlohmann::json::parse(mine.engine->trace_json());
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("ph") == "X" && event.at("name") != "(end of the step)") {
      bars.push_back(event.at("name"));
    }
  }
  EXPECT_EQ(bars, std::vector<std::string>{mine.step->name() + " forward"});
}

TEST_F(WholeStepStateTest, AllStepsOfAnEngineObeyItsHostCapTogether) {
  const auto pinned = [&](std::size_t cap) {
    WholeStepTrainer one(device_, {.layers = 4});
    one.graph(Options(device_).offload("**").min_bytes(1024).host_cap(cap));
    return one.engine->report().pinned_bytes;
  };
  constexpr std::size_t kMuch = std::size_t{1} << 24;
  const std::int64_t alone = pinned(kMuch);
  const std::int64_t cap = alone + alone / 2;
  WholeStepTrainer mine(device_, {.layers = 4});
  mine.graph(Options(device_).offload("**").min_bytes(1024).host_cap(static_cast<std::size_t>(cap)));
  EXPECT_EQ(mine.engine->report().pinned_bytes, alone);
  GraphedStep other =
      make_graphed_step(*mine.engine, Callable("other", &stack_loss, mine.model), mine.data(7), StepOptions());
  const Report report = mine.engine->report();
  EXPECT_GT(report.pinned_bytes, alone);
  EXPECT_LE(report.pinned_bytes, cap);
  EXPECT_EQ(report.host_cap, cap);
  EXPECT_GT(other.offloaded_bytes(), 0U);
  EXPECT_LT(other.offloaded_bytes(), mine.step->offloaded_bytes());
  EXPECT_TRUE(std::any_of(report.groups.begin(), report.groups.end(),
                          [](const GroupReport& group) { return group.kept_because == "over the host cap"; }));
  other.reset();
  relocate(*mine.model);  // a capture in the place of another has its room
  WholeStepTrainer plain(device_, mine.form);
  EXPECT_TRUE(same(mine.run(0), plain.run(0)));
  EXPECT_EQ(mine.engine->report().pinned_bytes, alone);
}

TEST_F(WholeStepStateTest, AWarmUpHoldsNoMoreThanTheStepThatItIsFor) {
  const auto peak = [&](bool offload) {
    WholeStepTrainer mine(device_, {.layers = 24});
    synchronize(device_);
    release_cached_memory(device_);
    const std::int64_t before = memory_use(device_).allocated;
    std::int64_t most = 0;
    int runs = 0;
    mine.engine = std::make_unique<OffloadEngine>(*mine.model, Options(device_).offload("**").min_bytes(1024));
    const auto loss = [&](torch::nn::SequentialImpl& model, const Tensors& inputs) {
      Tensors made = stack_loss(model, inputs);
      ++runs;
      most = std::max(most, memory_use(device_).allocated - before);  // with all that its forward has saved
      return made;
    };
    const GraphedStep step =
        make_graphed_step(*mine.engine, Callable("step", owning(loss), mine.model), mine.data(7),
                          StepOptions().offload(offload).graph(GraphOptions().num_warmup_iters(2)));
    EXPECT_EQ(runs, 4);
    return std::pair(most, static_cast<std::int64_t>(step.offloaded_bytes()));
  };
  const auto [without, nothing] = peak(false);
  const auto [with, bytes] = peak(true);
  EXPECT_EQ(nothing, 0);
  EXPECT_GT(bytes, 24 * 16 * 32 * 4);
  EXPECT_LE(with, without - bytes / 2);
}

TEST_F(WholeStepStateTest, IsVerifiedAsCallsAre) {
  WholeStepTrainer mine(device_, {.microbatches = 2, .extras = {.dropout = 0.2, .batch_norm = true}, .updates = true});
  mine.graph(Options(device_).offload("fc1").min_bytes(1024).verify_replays(kStateSteps));
  expect_plain(mine, /*in_steps=*/true);
  const Report report = mine.engine->report();
  EXPECT_EQ(report.verified_forwards, kStateSteps);
  EXPECT_GT(report.offloaded_bytes, 0);
  EXPECT_EQ(report.offloaded_bytes, static_cast<std::int64_t>(mine.step->offloaded_bytes()));  // of the latest step
}

TEST_F(WholeStepStateTest, AnEagerBackwardThroughUpdatedParametersIsRefused) {
  WholeStepTrainer mine(device_, {.updates = true});
  mine.graph(Options(device_));
  const at::Tensor loss = stack_loss(*mine.model, mine.data(3)[0])[0];
  (void)mine.run(0);
  EXPECT_THROWS(c10::Error, "modified by an inplace operation", loss.backward());
}

TEST_F(WholeStepStateTest, GradientsTakeThePlaceOfThoseThatWereThere) {
  WholeStepTrainer mine(device_, {});
  WholeStepTrainer plain(device_, {});
  mine.graph(Options(device_));
  const at::Tensor held = at::ones_like(mine.model->parameters()[0]);
  mine.model->parameters()[0].mutable_grad() = held;
  EXPECT_TRUE(same(mine.run(0), plain.run(0)));
  EXPECT_TRUE(at::equal(held.cpu(), at::ones_like(held.cpu())));
  (*mine.step)(mine.data(1));
  mine.model->zero_grad(/*set_to_none=*/false);
  EXPECT_TRUE(same(mine.run(2), plain.run(2)));
}

/// Two weights, of which the loss reads the second in training mode, or as a plain member says.
class SwitchedStepModel : public torch::nn::Module {
 public:
  SwitchedStepModel()
      : always_(register_parameter("always", at::full({32}, 0.5))),
        switched_(register_parameter("switched", at::full({32}, 0.25))) {}
  static Tensors loss(SwitchedStepModel& model, const Tensors& inputs) {
    at::Tensor y = inputs[0] * model.always_;
    y = model.on.value_or(model.is_training()) ? y * model.switched_ : y;
    return {(y * inputs[1]).sum()};
  }
  std::optional<bool> on;

 private:
  at::Tensor always_, switched_;
};

TEST_F(WholeStepStateTest, AnEagerRunLeavesNoGradientsOfTheGraphs) {
  for (const bool accumulate : {false, true}) {
    auto mine = std::make_shared<SwitchedStepModel>();
    SwitchedStepModel plain;
    mine->to(device_);
    plain.to(device_);
    OffloadEngine engine(*mine, Options(device_));
    const auto data = [&](std::int64_t s) { return Tensors{rows(s, device_), rows(s, device_, 1)}; };
    GraphedStep step = make_graphed_step(engine, Callable("step", &SwitchedStepModel::loss, mine), {data(9)},
                                         StepOptions().accumulate(accumulate));
    for (std::int64_t s = 0; s < 4; ++s) {
      mine->train(s % 2 == 0);
      plain.train(s % 2 == 0);
      mine->zero_grad();
      plain.zero_grad();
      (void)step({data(s)});
      SwitchedStepModel::loss(plain, data(s))[0].backward();
      EXPECT_TRUE(same(gradients(*mine), gradients(plain))) << "step " << s;
    }
  }
}

TEST_F(WholeStepStateTest, AVerificationThatFailedLeavesNoGradientsToALaterReplay) {
  auto mine = std::make_shared<SwitchedStepModel>();
  SwitchedStepModel plain;
  mine->on = plain.on = false;
  mine->to(device_);
  plain.to(device_);
  OffloadEngine engine(*mine, Options(device_).verify_replays(1).verify_every(0));
  const auto data = [&](std::int64_t s) { return Tensors{rows(s, device_), rows(s, device_, 1)}; };
  GraphedStep step = make_graphed_step(engine, Callable("step", &SwitchedStepModel::loss, mine), {data(9)});
  mine->on = true;
  EXPECT_THROWS(VerificationError, "output 0 differs", (void)step({data(0)}));
  mine->on = false;
  const Tensors outputs = step({data(1)}).front();
  const at::Tensor loss = SwitchedStepModel::loss(plain, data(1))[0];
  loss.backward();
  EXPECT_TRUE(same({{"loss", outputs.at(0)}}, {{"loss", loss.detach()}}));
  EXPECT_TRUE(same(gradients(*mine), gradients(plain)));
}

TEST_F(WholeStepStateTest, GradientsThatAreGivenOtherMemoryAreTakenBack) {
  for (const bool accumulate : {false, true}) {
    WholeStepTrainer mine(device_, {.accumulate = accumulate});
    WholeStepTrainer plain(device_, {.accumulate = accumulate});
    mine.graph(Options(device_));
    for (std::int64_t s = 0; s < 4; ++s) {
      EXPECT_TRUE(same(mine.run(s), plain.run(s))) << accumulate << ", step " << s;
      for (const WholeStepTrainer* trainer : {&mine, &plain}) {
        for (const at::Tensor& parameter : trainer->model->parameters()) {
          parameter.grad().set_data(parameter.grad() * 2);
        }
      }
    }
  }
}

/// The loss of a stack that throws when it has run `left` times more.
auto loss_that_breaks(int& left) {
  return [&left](torch::nn::SequentialImpl& layers, const Tensors& inputs) {
    Tensors made = stack_loss(layers, inputs);
    if (left-- == 0) {
      throw std::runtime_error("the model broke");
    }
    return made;
  };
}

TEST_F(WholeStepStateTest, ACaptureThatFailsInItsGraphsPlaceHoldsNoPinnedMemory) {
  for (const int fails_in : {0, 1, 2}) {  // sizing, warm-up, capture
    WholeStepTrainer plain(device_, {.layers = 4});
    torch::nn::Sequential model = layer_stack(4, device_);
    OffloadEngine engine(*model, Options(device_).offload("**").min_bytes(512));
    int left = -1;
    const GraphedStep step = make_graphed_step(engine, Callable("step", owning(loss_that_breaks(left)), model),
                                               plain.data(0), StepOptions().graph(GraphOptions().num_warmup_iters(1)));
    EXPECT_GT(engine.report().pinned_bytes, 0);
    relocate(*model);
    left = fails_in;
    EXPECT_THROWS(std::runtime_error, "the model broke", (void)step(plain.data(1)));
    EXPECT_EQ(engine.report().pinned_bytes, 0) << "pass " << fails_in;
    EXPECT_EQ(step.offloaded_bytes(), 0U);
    (void)step(plain.data(2));
    (void)plain.run(2);
    EXPECT_TRUE(same(gradients(*model), gradients(*plain.model))) << "pass " << fails_in;
    EXPECT_GT(step.offloaded_bytes(), 0U);
  }
}

TEST_F(WholeStepStateTest, ACaptureThatFailsHoldsNoDeviceMemory) {
  const auto allocated = [&] {
    synchronize(device_);
    return memory_use(device_).allocated;
  };
  const auto falls_to = [&](std::int64_t bytes) { return eventually([&] { return allocated() == bytes; }); };
  const std::vector<Tensors> samples = WholeStepTrainer(device_, {.layers = 4}).data(0);
  std::int64_t held_by_samples = 0;
  for (const at::Tensor& sample : samples.front()) {
    held_by_samples += static_cast<std::int64_t>(sample.nbytes());
  }
  EXPECT_TRUE(falls_to(held_by_samples)) << "of earlier tests";
  for (const int fails_in : {0, 1, 2}) {  // sizing, warm-up, capture
    {
      torch::nn::Sequential model = layer_stack(4, device_);
      OffloadEngine engine(*model, Options(device_).offload("**").min_bytes(512));
      int left = fails_in;
      EXPECT_THROWS(std::runtime_error, "the model broke",
                    (void)make_graphed_step(engine, Callable("step", owning(loss_that_breaks(left)), model), samples,
                                            StepOptions().graph(GraphOptions().num_warmup_iters(1))));
    }
    EXPECT_TRUE(falls_to(held_by_samples)) << "pass " << fails_in;
  }
}

TEST_F(WholeStepStateTest, ResetGivesItsMemoryBack) {
  WholeStepTrainer mine(device_, {.layers = 4});
  mine.graph(Options(device_).offload("**").min_bytes(1024));
  (void)mine.run(0);
  EXPECT_GT(mine.engine->report().pinned_bytes, 0);
  mine.step->reset();
  EXPECT_EQ(mine.engine->report().pinned_bytes, 0);
  EXPECT_EQ(mine.step->captures(), 0U);
}

}  // namespace
}  // namespace sidestream::testing_model
