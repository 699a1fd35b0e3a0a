#include <memory>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "expect_throws.h"
#include "sidestream/error.h"
#include "sidestream/graph_pool.h"
#include "unit/graphs/graphed_step_fixture.h"

namespace sidestream::testing_model {
namespace {

class WholeStepErrorTest : public testing::Test {
 protected:
  /// A capture with `update` fails with an Error that holds `text`, and leaves parameters, gradients and random state as they were.
  template <class Error>
  void expect_refused(WholeStepTrainer& trainer, const std::function<void()>& update, const char* text) {
    (void)stack_loss(*trainer.model, trainer.data(0)[0])[0].backward();
    const StepTensors before = trainer.state();
    const at::Tensor random = at::globalContext().defaultGenerator(device_).get_state();
    trainer.engine = std::make_unique<OffloadEngine>(*trainer.model, Options(device_));
    EXPECT_THROWS(Error, text,
                  (void)make_graphed_step(*trainer.engine, Callable("step", &stack_loss, trainer.model),
                                          trainer.data(1), StepOptions().update(update)));
    EXPECT_TRUE(same(trainer.state(), before));
    EXPECT_TRUE(at::equal(at::globalContext().defaultGenerator(device_).get_state(), random));
    WholeStepTrainer plain(device_, trainer.form);
    EXPECT_TRUE(same(trainer.run(2), plain.run(2)));  // eagerly
  }
  Callable stack_step(const WholeStepTrainer& trainer) const { return Callable("step", &stack_loss, trainer.model); }

  c10::Device device_ = find_device("sim");
};

TEST_F(WholeStepErrorTest, RefusesOptimizersThatCountOnTheHost) {
  WholeStepTrainer trainer(device_, {});
  torch::optim::AdamW adamw(trainer.model->parameters());
  expect_refused<CaptureError>(
      trainer, [&] { adamw.step(); }, "use sidestream::AdamW");
  WholeStepTrainer another(device_, {});
  torch::optim::Adam adam(another.model->parameters());
  expect_refused<CaptureError>(
      another, [&] { adam.step(); }, "torch::optim::AdamW, Adam");
}

TEST_F(WholeStepErrorTest, RefusesStateThatAnUpdateMakesForItself) {
  WholeStepTrainer trainer(device_, {});
  torch::optim::SGD sgd(trainer.model->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
  expect_refused<CaptureError>(
      trainer, [&] { sgd.step(); }, "keeps state that it made in the warm-up");
}

TEST_F(WholeStepErrorTest, RefusesValuesThatAreReadOnTheHost) {
  WholeStepTrainer trainer(device_, {});
  expect_refused<CaptureError>(
      trainer, [&] { (void)torch::nn::utils::clip_grad_norm_(trainer.model->parameters(), 1.0); },
      "use sidestream::clip_grad_norm_");
}

TEST_F(WholeStepErrorTest, RefusesToSetTheRateInACapture) {
  WholeStepTrainer trainer(device_, {});
  expect_refused<UsageError>(
      trainer, [&] { trainer.optimizer.set_lr(0.5); }, "set_lr was called inside a capture");
  EXPECT_NE(trainer.optimizer.lr(), 0.5);
}

TEST_F(WholeStepErrorTest, RefusesAnUpdateThatWouldLeaveAGradientOut) {
  WholeStepTrainer trainer(device_, {});
  trainer.engine = std::make_unique<OffloadEngine>(*trainer.model, Options(device_));
  const auto of_first_layer = [](torch::nn::SequentialImpl& model, const Tensors& in) {
    return Tensors{(model.begin()->forward(in[0]) * in[1]).sum()};
  };
  GraphedStep step =
      make_graphed_step(*trainer.engine, Callable("head", of_first_layer, trainer.model), trainer.data(1),
                        StepOptions().accumulate(true).update([&] { trainer.update(); }));
  (void)step(trainer.data(2));
  trainer.model->zero_grad();
  (trainer.model->forward(trainer.data(3)[0][0])).sum().backward();  // all layers have gradients
  EXPECT_THROWS(UsageError, "would skip that parameter", (void)step(trainer.data(4)));
  trainer.model->zero_grad();
  (void)step(trainer.data(5));
}

TEST_F(WholeStepErrorTest, RefusesToClearGradientsInTheUpdate) {
  WholeStepTrainer trainer(device_, {});
  expect_refused<UsageError>(
      trainer,
      [&] {
        trainer.update();
        trainer.optimizer.zero_grad();
      },
      "cleared or replaced the .grad");
}

TEST_F(WholeStepErrorTest, LeavesEverythingWhereAnUpdateThrows) {
  WholeStepTrainer trainer(device_, {});
  int runs = 0;
  expect_refused<std::runtime_error>(
      trainer,
      [&] {
        trainer.update();
        if (++runs == 3) {
          throw std::runtime_error("the update's own");
        }
      },
      "the update's own");
}

TEST_F(WholeStepErrorTest, NamesTheParameterWhoseMemoryAnInputShares) {
  WholeStepTrainer trainer(device_, {});
  const StepTensors before = trainer.state();
  OffloadEngine engine(*trainer.model, Options(device_));
  const auto decayed = [](torch::nn::SequentialImpl& model, const Tensors& in) -> Tensors {
    return {stack_loss(model, {in[0], in[1]})[0] + in[2].square().sum()};
  };
  const auto weight = trainer.model->named_parameters()[0];
  std::vector<Tensors> inputs = trainer.data(0);
  inputs[0].push_back(weight.value().detach());
  EXPECT_THROWS(CaptureError, "it writes its input 2 (parameter \"" + weight.key() + "\", ",
                (void)make_graphed_step(engine, Callable("step", decayed, trainer.model), inputs,
                                        StepOptions().update([&] { trainer.update(); })));
  EXPECT_TRUE(same(trainer.state(), before));
}

TEST_F(WholeStepErrorTest, RefusesStepFunctionsWithoutALoss) {
  WholeStepTrainer trainer(device_, {});
  OffloadEngine engine(*trainer.model, Options(device_));
  const auto make = [&](auto function) {
    (void)make_graphed_step(engine, Callable("step", function, trainer.model), trainer.data(0));
  };
  EXPECT_THROWS(UsageError, "returns no loss",
                make([](torch::nn::SequentialImpl&, const Tensors&) -> Tensors { return {}; }));
  EXPECT_THROWS(UsageError, "of one element", make([](torch::nn::SequentialImpl& model, const Tensors& in) -> Tensors {
                  return {model.forward(in[0])};
                }));
  EXPECT_THROWS(UsageError, "depends on no parameter",
                make([](torch::nn::SequentialImpl& model, const Tensors& in) -> Tensors {
                  return {model.forward(in[0]).sum().detach()};
                }));
}

TEST_F(WholeStepErrorTest, RefusesStepFunctionsThatRunBackwardThemselves) {
  WholeStepTrainer trainer(device_, {});
  OffloadEngine engine(*trainer.model, Options(device_));
  const auto own_backward = [](torch::nn::SequentialImpl& model, const Tensors& in) -> Tensors {
    const at::Tensor loss = model.forward(in[0]).sum();
    loss.backward();
    return {loss};
  };
  EXPECT_THROWS(CaptureError, "calls backward()",
                (void)make_graphed_step(engine, Callable("step", own_backward, trainer.model), trainer.data(0)));
}

TEST_F(WholeStepErrorTest, RefusesWhatACallableHasForOthers) {
  WholeStepTrainer trainer(device_, {});
  OffloadEngine engine(*trainer.model, Options(device_));
  EXPECT_THROWS(UsageError, "input names",
                (void)make_graphed_step(engine, stack_step(trainer).input_names({"x", "y"}), trainer.data(0)));
}

TEST_F(WholeStepErrorTest, RefusesOptionsThatDoNotFit) {
  WholeStepTrainer trainer(device_, {});
  OffloadEngine engine(*trainer.model, Options(device_));
  const auto make = [&](const StepOptions& options, const std::vector<Tensors>& samples) {
    (void)make_graphed_step(engine, stack_step(trainer), samples, options);
  };
  EXPECT_THROWS(UsageError, "no samples", make({}, {}));
  EXPECT_THROWS(UsageError, "max_captures is 0", make(StepOptions().max_captures(0), trainer.data(0)));
  EXPECT_THROWS(
      UsageError, "StepOptions::accumulate",
      make(StepOptions().graph(GraphOptions().gradients("**", GradientPolicy::accumulated)), trainer.data(0)));
  EXPECT_THROWS(UsageError, "StepOptions::graph sets pool",
                make(StepOptions().graph(GraphOptions().pool(std::make_shared<GraphPool>(device_))), trainer.data(0)));
  EXPECT_THROWS(UsageError, "an input requires a gradient",
                make({}, {{rows(0, device_).requires_grad_(true), rows(0, device_, 1)}}));
}

TEST_F(WholeStepErrorTest, RefusesCallsThatDoNotFit) {
  WholeStepTrainer trainer(device_, {.accumulate = true});
  trainer.graph(Options(device_));
  auto& step = *trainer.step;
  EXPECT_THROWS(UsageError, "other shapes",
                (void)step({{rows(0, device_).narrow(0, 0, 8), rows(0, device_, 1).narrow(0, 0, 8)}}));
  EXPECT_THROWS(UsageError, "or devices than captured", (void)step({{rows(0, device_).cpu(), rows(0, device_, 1)}}));
  EXPECT_THROWS(UsageError, "number of microbatches", (void)step({trainer.data(0)[0], trainer.data(0)[0]}));
  EXPECT_THROWS(UsageError, "number of microbatches", (void)step({}));
  EXPECT_THROWS(UsageError, "an input requires a gradient",
                (void)step({{rows(0, device_).requires_grad_(true), rows(0, device_, 1)}}));
  {
    const at::NoGradGuard no_grad;
    EXPECT_THROWS(UsageError, "under no_grad", (void)step(trainer.data(0)));
  }
  at::Tensor parameter = trainer.model->parameters()[0];
  const at::Tensor held = at::ones_like(parameter);
  parameter.mutable_grad() = held.detach();
  EXPECT_THROWS(UsageError, "other code holds a reference to it", (void)step(trainer.data(0)));
  EXPECT_TRUE(at::equal(held.cpu(), at::ones_like(held.cpu())));
  parameter.mutable_grad() = at::Tensor();
  const auto hook = parameter.register_hook([](const at::Tensor& grad) { return grad * 2; });
  EXPECT_THROWS(UsageError, "gradient hooks", (void)step(trainer.data(0)));
  EXPECT_THROWS(UsageError, "gradient hooks",
                (void)make_graphed_step(*trainer.engine, stack_step(trainer), trainer.data(0)));
  parameter.remove_hook(hook);
  (void)step(trainer.data(0));
  step.reset();
  step.reset();
  EXPECT_THROWS(UsageError, "called after GraphedStep::reset", (void)step(trainer.data(0)));
}

TEST_F(WholeStepErrorTest, RefusesInputsOnAnotherDeviceIfItMayCaptureAgain) {
  WholeStepTrainer trainer(device_, {});
  trainer.engine = std::make_unique<OffloadEngine>(*trainer.model, Options(device_));
  GraphedStep step =
      make_graphed_step(*trainer.engine, stack_step(trainer), trainer.data(0), StepOptions().max_captures(2));
  for (int i = 0; i < 3; ++i) {
    EXPECT_THROWS(UsageError, "is on cpu", (void)step({{rows(0, device_).cpu(), rows(0, device_, 1)}}));
  }
  (void)step(
      {{rows(0, device_).narrow(0, 0, 8), rows(0, device_, 1).narrow(0, 0, 8)}});  // there is room for another capture
}

}  // namespace
}  // namespace sidestream::testing_model
