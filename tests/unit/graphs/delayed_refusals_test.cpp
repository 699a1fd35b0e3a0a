// Weight gradients that are delayed: what is refused, and what is left after a failure, a reset or an eager run.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "expect_throws.h"
#include "graphs/engine/engine_access.h"
#include "models/plain_twin.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "unit/graphs/called_stack.h"
#include "unit/graphs/delayed_weights_fixture.h"

namespace sidestream::testing_model {
namespace {

class DelayedRefusalsTest : public DelayedCallablesTest {
 protected:
  /// A backward of the graphed stack whose last call is layer `last`.
  void fail_in_backward(std::int64_t last) {
    at::Tensor h = stacks_.input(9);
    for (std::size_t i = 0; i < stacks_.layers.size(); ++i) {
      if (static_cast<std::int64_t>(i) == last) {
        h.register_hook([](const at::Tensor&) { throw std::runtime_error("the hook's"); });
      }
      h = stacks_.run_layer(true, i, h);
    }
    EXPECT_THROWS(std::runtime_error, "the hook's", h.sum().backward());
    for (at::Tensor& parameter : stacks_.model->parameters()) {
      parameter.mutable_grad().reset();
    }
  }
};

TEST_F(DelayedRefusalsTest, RefusesASecondAndAMissingCall) {
  stacks_.capture(delayed());
  expect_plain(0, [&] {
    stacks_.layers[2].backward_dw();
    EXPECT_THROWS(UsageError, "no weight gradients are delayed", stacks_.layers[2].backward_dw());
    compute_all();
    compute_all();  // nothing is left
  });
  EXPECT_THROWS(UsageError, "weight gradients of graphed call \"layers.3\" are delayed and were not computed",
                in_step(&*stacks_.engine, [&] { stacks_.loss(true, stacks_.input(1), 1).backward(); }));
  expect_plain(1, [&] { compute_all(); });
}

TEST_F(DelayedRefusalsTest, RefusesAForwardThatWouldOverwriteWhatTheyAreComputedFrom) {
  stacks_.capture(delayed());
  expect_plain(0, [&] {
    stacks_.layers[3].backward_dw();
    EXPECT_THROWS(UsageError, "call backward_dw first", (void)stacks_.layers[0]({stacks_.input(1)}));
    compute_all();
  });
}

TEST_F(DelayedRefusalsTest, RefusesTensorsThatWereChangedInPlace) {
  stacks_.capture(delayed());
  const auto change = [&] {
    at::Tensor h = stacks_.run_layer(true, 0, stacks_.input(0));
    stacks_.run_layer(true, 1, h).sum().backward();
    const at::NoGradGuard no_grad;
    h.mul_(2);
    compute_all();
  };
  EXPECT_THROWS(UsageError, "was changed in place before backward_dw", in_step(&*stacks_.engine, change));
  expect_plain(1, [&] { compute_all(); });
}

TEST_F(DelayedRefusalsTest, RefusesParametersThatWereFrozenInBetween) {
  stacks_.capture(delayed());
  at::Tensor parameter = stacks_.model->named_parameters()["1.fc1"];
  expect_plain(0, [&] {
    parameter.requires_grad_(false);
    EXPECT_THROWS(UsageError, "frozen between the call's backward and backward_dw", compute_all());
    parameter.requires_grad_(true);
    compute_all();
  });
  EXPECT_THROWS(UsageError, "frozen between the call's forward and its backward", in_step(&*stacks_.engine, [&] {
                  const at::Tensor loss = stacks_.loss(true, stacks_.input(1), 1);
                  parameter.requires_grad_(false);
                  loss.backward();
                }));
  parameter.requires_grad_(true);
  expect_plain(1, [&] { compute_all(); });
}

TEST_F(DelayedRefusalsTest, ABackwardThatNamesInputsDelaysNone) {
  stacks_.capture(Options(device_).verify_replays(1), delayed());
  for (const std::int64_t s : {0, 1}) {
    const auto adversarial = [&](bool graphed) {
      return train_step(graphed ? *stacks_.model : *stacks_.plain, graphed ? &*stacks_.engine : nullptr, [&] {
        const at::Tensor x = stacks_.input(s);
        const at::Tensor g = torch::autograd::grad({stacks_.loss(graphed, x, s)}, {x})[0];
        stacks_.loss(graphed, (x + g.sign()).detach().requires_grad_(true), s).backward();
        if (graphed) {
          compute_all();
        }
      });
    };
    const StepTensors plain = adversarial(false);
    EXPECT_TRUE(same(adversarial(true), plain)) << "step " << s;
  }
  in_step(&*stacks_.engine, [&] {
    const at::Tensor x = stacks_.input(2);
    stacks_.loss(true, x, 2).backward({}, std::nullopt, false, {{x}});
  });  // nothing is missing
}

TEST_F(DelayedRefusalsTest, EagerRunsComputeAllGradients) {
  stacks_.capture(delayed());
  stacks_.model->eval();  // runs eagerly
  stacks_.plain->eval();
  expect_plain(0, [&] {
    for (const GraphedCallable& layer : stacks_.layers) {
      layer.backward_dw();
    }
  });
}

TEST_F(DelayedRefusalsTest, IsRefusedWithRetainedGraphs) {
  EXPECT_THROWS(UsageError, "retain_graph_in_backward", stacks_.capture(delayed().retain_graph_in_backward(true)));
}

TEST_F(DelayedRefusalsTest, AResetCallableDoesNotHoldUpTheOthers) {
  stacks_.capture(delayed(), /*linked=*/false);
  const auto run = [&] {
    const at::Tensor first = stacks_.run_layer(true, 1, stacks_.input(1));
    stacks_.run_layer(true, 3, stacks_.input(0)).sum().backward();
    first.sum().backward();
    stacks_.layers[3].reset();
    EXPECT_THROWS(UsageError, "it was reset since its backward", compute_all());
    compute_all();
  };
  in_step(&*stacks_.engine, run);
  EXPECT_TRUE(stacks_.model->named_parameters()["1.fc1"].grad().defined());
}

TEST_F(DelayedRefusalsTest, ABackwardThatFailsDelaysNothing) {
  stacks_.capture(delayed());
  for (const std::int64_t s : {0, 1}) {
    const at::Tensor x = stacks_.input(s);
    const auto step = [&](bool graphed) {
      return train_step(graphed ? *stacks_.model : *stacks_.plain, graphed ? &*stacks_.engine : nullptr, [&] {
        if (graphed) {
          fail_in_backward(3 - s);
          EXPECT_THROWS(UsageError, "failed or named inputs", stacks_.layers[3].backward_dw());
        }
        stacks_.loss(graphed, x, s).backward();
        if (graphed) {
          compute_all();
        }
      });
    };
    const StepTensors plain = step(false);
    EXPECT_TRUE(same(step(true), plain)) << "step " << s;
  }
  in_step(&*stacks_.engine, [&] { fail_in_backward(2); });  // nothing is missing
}

/// docs/contract.md, "A backward that failed half-way".
TEST_F(DelayedRefusalsTest, WhatWasDelayedBeforeAFailedBackwardIsComputedBeforeGradientsAreCleared) {
  CalledStack model(device_);
  CalledStack plain(device_);
  OffloadEngine engine(model, Options(device_).graph("layers.*").graph_options(delayed()));
  for (std::int64_t s = 0; s < 3; ++s) {
    expect_same_step(model, &engine, plain, s, [&](CalledStack& trained) {
      const bool graphed = &trained == &model;
      const auto loss = [&](std::int64_t microbatch) {
        return trained.forward(rows(s, device_, microbatch)).square().mean();
      };
      if (graphed && s == 2) {
        const at::Tensor first = loss(0);
        const at::Tensor second = loss(1);
        first.backward();
        second.register_hook([](const at::Tensor&) { throw std::runtime_error("the hook's"); });
        EXPECT_THROWS(std::runtime_error, "the hook's", second.backward());
        engine.backward_dw();
        clear_gradients(trained);
      }
      const at::Tensor first = loss(0);
      const at::Tensor second = loss(1);
      first.backward();
      second.backward();
      if (graphed) {
        engine.backward_dw();
      }
    });
  }
}

TEST_F(DelayedRefusalsTest, RefusesWhatTheEngineForgotSinceABackwardOutsideOfSteps) {
  const auto expect_refusal = [&](const std::function<std::optional<Step>(CalledStack&, OffloadEngine&)>& forget) {
    CalledStack model(device_);
    OffloadEngine engine(model, Options(device_).graph("layers.*").offload("layers.*").graph_options(delayed()));
    for (std::int64_t s = 0; s < 3; ++s) {
      at::Tensor loss;
      in_step(&engine, [&] { loss = model.forward(rows(s, device_)).sum(); });
      loss.backward();
      if (s < 2) {
        engine.backward_dw();
      }
    }
    const std::optional<Step> step = forget(model, engine);
    for (std::size_t i = 0; i < model.layers->size(); ++i) {
      EXPECT_THROWS(UsageError, "it was reset since its backward. Call backward_dw before", engine.backward_dw());
    }
    engine.backward_dw();  // nothing is left
  };
  expect_refusal([](CalledStack&, OffloadEngine& engine) -> std::optional<Step> {
    engine.reset();
    return {};
  });
  expect_refusal([](CalledStack&, OffloadEngine& engine) -> std::optional<Step> {
    engine.set_activation_offloading("layers.*", /*on=*/false);
    return {};
  });
  expect_refusal([](CalledStack& model, OffloadEngine& engine) -> std::optional<Step> {
    for (at::Tensor& parameter : model.parameters()) {
      parameter.set_data(parameter.detach().clone());
    }
    return engine.step();
  });
}

TEST_F(DelayedRefusalsTest, RefusesABackwardWithoutItsEngine) {
  CalledStack model(device_);
  std::optional<OffloadEngine> engine(std::in_place, model,
                                      Options(device_).graph("layers.*").graph_options(delayed()));
  at::Tensor loss;
  for (std::int64_t s = 0; s < 3; ++s) {
    in_step(&*engine, [&] { loss = model.forward(rows(s, device_)).sum(); });
    if (s < 2) {
      loss.backward();
      engine->backward_dw();
    }
  }
  engine.reset();
  EXPECT_THROWS(UsageError, "the engine, which computes them, is gone", loss.backward());
}

TEST_F(DelayedRefusalsTest, IfAHookThrowsTheRestIsDropped) {
  stacks_.capture(delayed());
  bool throws = true;
  const auto parameters = stacks_.model->named_parameters();
  parameters["3.fc1"].register_hook([&](const at::Tensor& grad) {
    if (throws) {
      throw std::runtime_error("the hook's");
    }
    return grad;
  });
  expect_plain(0, [&] {
    EXPECT_THROWS(std::runtime_error, "the hook's", compute_all());
    compute_all();
    EXPECT_FALSE(parameters["2.fc1"].grad().defined());
    throws = false;
    for (at::Tensor& parameter : stacks_.model->parameters()) {
      parameter.mutable_grad().reset();
    }
    const at::Tensor x = stacks_.input(0);
    stacks_.loss(true, x, 0).backward();
    compute_all();
  });
}

TEST_F(DelayedRefusalsTest, AnEagerRunBetweenAForwardAndItsWeightGradients) {
  stacks_.capture(delayed(), /*linked=*/false);
  in_step(&*stacks_.engine, [&] {
    const at::Tensor replayed = stacks_.run_layer(true, 0, stacks_.input(0));
    stacks_.model->eval();
    const at::Tensor eager = stacks_.run_layer(true, 0, stacks_.input(1));
    stacks_.model->train();
    replayed.sum().backward();
    eager.sum().backward();
    stacks_.layers[0].backward_dw();
    stacks_.layers[0].backward_dw();
    EXPECT_THROWS(UsageError, "no weight gradients are delayed", stacks_.layers[0].backward_dw());
  });
}

}  // namespace
}  // namespace sidestream::testing_model
