// Whole steps whose weights change under them: unfrozen, replaced, relocated, and outside of the step's module.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "eventually.h"
#include "expect_throws.h"
#include "sidestream/error.h"
#include "unit/graphs/graphed_step_fixture.h"

namespace sidestream::testing_model {
namespace {

/// Two weights, one of which may be registered anew, and two that no module has.
class ChangingModel : public torch::nn::Module {
 public:
  explicit ChangingModel(c10::Device device)
      : first_(register_parameter("first", at::full({32}, 0.5, device))),
        second_(register_parameter("second", at::full({32}, 0.25, device))),
        outside(at::full({32}, 1.5, device).requires_grad_(true)) {}
  Tensors loss(const Tensors& inputs) {
    const at::Tensor y = (inputs[0] * first_).sin() * second_ * outside;
    return {(y * inputs[1]).sum()};
  }
  /// Another tensor in the place of the second weight.
  at::Tensor replace() {
    const at::Tensor before = second_;
    second_ = (before.detach() + 1).requires_grad_(true);
    parameters_["second"] = second_;
    return before;
  }

 private:
  at::Tensor first_, second_;

 public:
  at::Tensor outside;
};

class WholeStepWeightsTest : public testing::Test {
 protected:
  struct Trainer {
    explicit Trainer(c10::Device device) : model(std::make_shared<ChangingModel>(device)) {}

    void graph(c10::Device device, const std::vector<Tensors>& samples, const StepOptions& options) {
      if (engine == nullptr) {
        engine = std::make_unique<OffloadEngine>(*model, Options(device));
      }
      step = std::make_unique<GraphedStep>(make_graphed_step(
          *engine,
          Callable("step", owning([m = model](torch::nn::Module&, const Tensors& inputs) { return m->loss(inputs); }),
                   model),
          samples, options));
      accumulate = options.accumulate();
    }
    StepTensors run(const std::vector<Tensors>& microbatches) const {
      StepTensors result;
      if (step != nullptr) {
        for (const Tensors& made : (*step)(microbatches)) {
          result.emplace_back("loss", made[0]);
        }
      } else {
        if (!accumulate) {
          clear_gradients(*model);
          model->outside.mutable_grad() = at::Tensor();
        }
        for (const Tensors& inputs : microbatches) {
          const at::Tensor loss = model->loss(inputs)[0];
          loss.backward();
          result.emplace_back("loss", loss.detach());
        }
      }
      for (auto& gradient : gradients(*model)) {
        result.push_back(std::move(gradient));
      }
      result.emplace_back("outside", model->outside.grad());
      return result;
    }

    std::shared_ptr<ChangingModel> model;
    std::unique_ptr<OffloadEngine> engine;
    std::unique_ptr<GraphedStep> step;
    bool accumulate = false;
  };

  [[nodiscard]] std::vector<Tensors> data(std::int64_t s) const {
    return {{rows(s, device_), rows(s, device_, 1)}, {rows(s, device_, 2), rows(s, device_, 3)}};
  }
  /// Three steps of both, after `change` to each.
  void expect_plain_after(Trainer& mine, Trainer& plain, std::int64_t first,
                          const std::function<void(ChangingModel&)>& change) const {
    plain.accumulate = mine.accumulate;
    change(*mine.model);
    change(*plain.model);
    for (std::int64_t s = first; s < first + 3; ++s) {
      EXPECT_TRUE(same(mine.run(data(s)), plain.run(data(s)))) << "step " << s;
    }
  }

  c10::Device device_ = find_device("sim");
};

TEST_F(WholeStepWeightsTest, AddsNothingOfAWarmUpToTheGradientOfAnUnfrozenWeight) {
  for (const bool with_gradient : {false, true}) {
    Trainer mine(device_);
    Trainer plain(device_);
    mine.model->parameters()[1].requires_grad_(false);
    plain.model->parameters()[1].requires_grad_(false);
    mine.graph(device_, data(90), StepOptions().accumulate(true));
    expect_plain_after(mine, plain, 0, [](ChangingModel&) {});
    expect_plain_after(mine, plain, 3, [&](ChangingModel& model) {
      at::Tensor unfrozen = model.parameters()[1];
      unfrozen.requires_grad_(true);
      if (with_gradient) {
        unfrozen.mutable_grad() = at::full_like(unfrozen.detach(), 3);
      }
    });
    EXPECT_EQ(mine.engine->report().recaptures, 1);
  }
}

// As the discriminator is while the generator trains.
TEST_F(WholeStepWeightsTest, TheGradientOfAFrozenWeight) {
  const auto freeze = [](ChangingModel& model) {
    at::Tensor frozen = model.parameters()[1];
    frozen.requires_grad_(false);
    frozen.mutable_grad() = at::full_like(frozen.detach(), 3);
  };
  Trainer mine(device_);
  Trainer plain(device_);
  mine.model->parameters()[1].requires_grad_(false);
  plain.model->parameters()[1].requires_grad_(false);
  mine.graph(device_, data(90), StepOptions());
  expect_plain_after(mine, plain, 0, freeze);
  expect_plain_after(mine, plain, 3, [](ChangingModel& model) { model.parameters()[1].requires_grad_(true); });

  Trainer adds(device_);
  adds.model->parameters()[1].requires_grad_(false);
  const auto update = [&model = *adds.model] {
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : model.parameters()) {
      if (parameter.grad().defined()) {
        parameter.add_(parameter.grad(), -0.5);
      }
    }
  };
  adds.graph(device_, data(90), StepOptions().accumulate(true).update(update));
  freeze(*adds.model);
  EXPECT_THROWS(UsageError, "gradient", (void)adds.run(data(0)));
}

TEST_F(WholeStepWeightsTest, AddsNothingOfAWarmUpToTheGradientOfAReplacedWeight) {
  for (const bool accumulate : {false, true}) {
    Trainer mine(device_);
    Trainer plain(device_);
    mine.graph(device_, data(90), StepOptions().accumulate(accumulate));
    expect_plain_after(mine, plain, 0, [](ChangingModel&) {});
    at::Tensor before;
    expect_plain_after(mine, plain, 3, [&](ChangingModel& model) { before = model.replace(); });
    EXPECT_EQ(mine.engine->report().recaptures, 1);
  }
}

TEST_F(WholeStepWeightsTest, LeavesTheGradientOfAReplacedWeightAlone) {
  Trainer mine(device_);
  mine.graph(device_, data(90), StepOptions().accumulate(true).update([] {}));
  (void)mine.run(data(0));
  const at::Tensor before = mine.model->replace();
  const at::Tensor gradient = before.grad().cpu().clone();
  (void)mine.run(data(1));
  (void)mine.run(data(2));
  EXPECT_TRUE(at::equal(before.grad().cpu(), gradient));
}

TEST_F(WholeStepWeightsTest, FollowsARelocatedWeightOutsideOfTheModule) {
  for (const bool accumulate : {false, true}) {
    Trainer mine(device_);
    Trainer plain(device_);
    mine.graph(device_, data(90), StepOptions().accumulate(accumulate));
    expect_plain_after(mine, plain, 0, [](ChangingModel&) {});
    expect_plain_after(mine, plain, 3,
                       [](ChangingModel& model) { model.outside.set_data(model.outside.detach() * 2); });
    EXPECT_EQ(mine.engine->report().recaptures, 1);
  }
}

TEST_F(WholeStepWeightsTest, RefusesARelocatedWeightOutsideOfTheModuleByOption) {
  Trainer mine(device_);
  mine.graph(device_, data(90), StepOptions().graph(GraphOptions().on_relocated_weights(OnRelocatedWeights::error)));
  (void)mine.run(data(0));
  mine.model->outside.set_data(mine.model->outside.detach() * 2);
  EXPECT_THROWS(UsageError, "lies in other memory", (void)mine.run(data(1)));
}

TEST_F(WholeStepWeightsTest, CapturesAgainWithGradientsOutsideOfTheModule) {
  for (const std::int64_t warm_ups : {0, 2}) {
    for (const bool accumulate : {false, true}) {
      Trainer mine(device_);
      Trainer plain(device_);
      const StepOptions options = StepOptions().accumulate(accumulate).graph(GraphOptions().num_warmup_iters(warm_ups));
      const at::Tensor held = at::full({32}, 7.0, device_);
      mine.model->outside.mutable_grad() = held.detach();
      mine.graph(device_, data(90), options);
      EXPECT_TRUE(at::equal(held.cpu(), at::full({32}, 7.0)));
      EXPECT_EQ(mine.model->outside.grad().const_data_ptr(), held.const_data_ptr());
      mine.model->outside.mutable_grad() = at::Tensor();
      expect_plain_after(mine, plain, 0, [](ChangingModel&) {});
      const auto first = std::move(mine.step);
      mine.graph(device_, data(91), options);
      EXPECT_TRUE(at::equal(held.cpu(), at::full({32}, 7.0)));
      expect_plain_after(mine, plain, 3, [](ChangingModel&) {});
    }
  }
}

TEST_F(WholeStepWeightsTest, AnEagerRunMeetsWeightsThatNoCaptureDid) {
  for (const bool accumulate : {false, true}) {
    Trainer mine(device_);
    Trainer plain(device_);
    bool agreed = true;
    mine.model->parameters()[1].requires_grad_(false);
    plain.model->parameters()[1].requires_grad_(false);
    mine.graph(
        device_, data(90),
        StepOptions().accumulate(accumulate).graph(GraphOptions().agree_to_capture([&](bool) { return agreed; })));
    expect_plain_after(mine, plain, 0, [](ChangingModel&) {});
    agreed = false;
    expect_plain_after(mine, plain, 3, [&](ChangingModel& model) {
      at::Tensor unfrozen = model.parameters()[1];
      unfrozen.requires_grad_(true);
      unfrozen.mutable_grad() = at::full_like(unfrozen.detach(), 3);
    });
    agreed = true;
    expect_plain_after(mine, plain, 6, [](ChangingModel&) {});
    EXPECT_EQ(mine.engine->report().recaptures, 1);
  }
}

TEST_F(WholeStepWeightsTest, LeavesNoGradientOfAnEagerRunToAWeightThatTheGraphDoesNotRead) {
  for (const bool updates : {false, true}) {
    const auto loss = [](ChangingModel& model, const Tensors& inputs) {
      const at::Tensor y = inputs[0] * model.parameters()[0];
      return Tensors{((model.is_training() ? y : y * model.outside) * inputs[1]).sum()};
    };
    const auto all = [](const ChangingModel& model) {
      return std::vector<at::Tensor>{model.parameters()[0], model.outside};
    };
    Trainer mine(device_);
    Trainer plain(device_);
    AdamW updated(all(*mine.model), 0.1);
    AdamW expected(all(*plain.model), 0.1);
    OffloadEngine engine(*mine.model, Options(device_));
    StepOptions options;
    if (updates) {
      options.update([&] { updated.step(); });
    }
    GraphedStep step = make_graphed_step(engine, Callable("step", owning(loss), mine.model), {data(90)[0]}, options);
    for (std::int64_t s = 0; s < 5; ++s) {
      mine.model->train(s % 2 == 1);  // eagerly, then as the graph
      plain.model->train(s % 2 == 1);
      (void)step({data(s)[0]});
      expected.zero_grad();
      loss(*plain.model, data(s)[0])[0].backward();
      if (updates) {
        expected.step();
      }
      for (const auto i : {0U, 1U}) {
        const at::Tensor weight = all(*mine.model)[i];
        const at::Tensor other = all(*plain.model)[i];
        EXPECT_TRUE(same({{"gradient", weight.grad()}, {"weight", weight.detach()}},
                         {{"gradient", other.grad()}, {"weight", other.detach()}}))
            << "weight " << i << ", step " << s << (updates ? ", with an update" : "");
      }
    }
  }
}

/// The weights of a model, and one more, which no loss leads to.
struct ForeignWeight {
  explicit ForeignWeight(c10::Device device) : weight(at::ones({32}, device).requires_grad_(true)) {}
  [[nodiscard]] std::vector<at::Tensor> beside(const ChangingModel& model) const {
    std::vector<at::Tensor> all = model.parameters();
    all.push_back(weight);
    return all;
  }
  void give_gradient() { weight.mutable_grad() = at::full_like(weight.detach(), 0.5); }
  at::Tensor weight;
};

TEST_F(WholeStepWeightsTest, RefusesAGradientThatTheUpdateWouldFreeze) {
  Trainer mine(device_);
  ForeignWeight foreign(device_);
  foreign.give_gradient();
  AdamW adamw(foreign.beside(*mine.model), 0.1);
  const auto clip = [&] { (void)clip_grad_norm_(foreign.beside(*mine.model), 1.0); };
  EXPECT_THROWS(CaptureError, "would freeze",
                mine.graph(device_, data(90), StepOptions().update([&] { adamw.step(); })));
  EXPECT_THROWS(UsageError, "would freeze", mine.graph(device_, data(90), StepOptions().update(clip)));
  EXPECT_THROWS(CaptureError, "would freeze", mine.graph(device_, data(90), StepOptions().update([&] {
    const at::NoGradGuard no_grad;
    foreign.weight.add_(foreign.weight.grad(), -0.1);
  })));
  EXPECT_TRUE(at::equal(foreign.weight.detach().cpu(), at::ones({32})));
  EXPECT_TRUE(at::equal(foreign.weight.grad().cpu(), at::full({32}, 0.5)));
  EXPECT_EQ(adamw.state()[0].step.cpu().item<float>(), 0);
}

TEST_F(WholeStepWeightsTest, RefusesAGradientThatTheUpdateWouldLeaveOut) {
  for (const bool accumulate : {false, true}) {
    Trainer mine(device_);
    ForeignWeight foreign(device_);
    AdamW adamw(foreign.beside(*mine.model), 0.1);
    mine.graph(device_, data(90), StepOptions().accumulate(accumulate).update([&] { adamw.step(); }));
    (void)mine.run(data(0));
    foreign.give_gradient();
    const at::Tensor before = mine.model->parameters()[0].detach().clone();
    EXPECT_THROWS(UsageError, "would freeze", (void)mine.run(data(1)));
    EXPECT_TRUE(at::equal(mine.model->parameters()[0].detach().cpu(), before.cpu()));
    foreign.weight.mutable_grad() = at::Tensor();
    (void)mine.run(data(1));
    EXPECT_TRUE(at::equal(foreign.weight.detach().cpu(), at::ones({32})));
  }
}

TEST_F(WholeStepWeightsTest, UpdatesWeightsOutsideOfTheModuleThatTheLossLeadsTo) {
  Trainer mine(device_);
  Trainer plain(device_);
  const auto all = [](const ChangingModel& model) {
    std::vector<at::Tensor> weights = model.parameters();
    weights.push_back(model.outside);
    return weights;
  };
  AdamW updated(all(*mine.model), 0.1);
  AdamW expected(all(*plain.model), 0.1);
  mine.model->outside.mutable_grad() = at::ones_like(mine.model->outside.detach());
  mine.graph(device_, data(90), StepOptions().update([&] { updated.step(); }));
  for (std::int64_t s = 0; s < 4; ++s) {
    EXPECT_TRUE(same(mine.run(data(s)), plain.run(data(s)))) << "step " << s;
    expected.step();
    EXPECT_TRUE(at::equal(mine.model->outside.detach().cpu(), plain.model->outside.detach().cpu())) << "step " << s;
  }
}

/// The gradient penalty of a critic: its loss leads to a leaf that the function makes.
Tensors penalty(ChangingModel& model, const Tensors& inputs) {
  const auto score = [&](const at::Tensor& x) {
    return (x * model.parameters()[0]).sin() * model.parameters()[1] * model.outside;
  };
  const at::Tensor real = inputs[0].detach().requires_grad_();
  const at::Tensor y = score(real);
  const at::Tensor slope =
      torch::autograd::grad({y.sum()}, {real}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
  return {(slope.norm(2, 1) - 1).square().mean() + y.mean(), slope};
}

StepTensors all_gradients(const ChangingModel& model) {
  StepTensors all = gradients(model);
  all.emplace_back("outside", model.outside.grad());
  return all;
}

TEST_F(WholeStepWeightsTest, ALeafThatTheStepMakesIsNoWeight) {
  for (const bool accumulate : {false, true}) {
    Trainer mine(device_);
    Trainer plain(device_);
    OffloadEngine engine(*mine.model, Options(device_));
    GraphedStep step = make_graphed_step(engine, Callable("step", &penalty, mine.model), data(90),
                                         StepOptions().accumulate(accumulate));
    for (std::int64_t s = 0; s < 5; ++s) {
      mine.model->train(s != 2);  // which runs eagerly
      plain.model->train(s != 2);
      if (!accumulate) {
        clear_gradients(*plain.model);
        plain.model->outside.mutable_grad() = at::Tensor();
      }
      const std::vector<Tensors> made = step(data(s));
      for (const auto m : {0U, 1U}) {
        const Tensors outputs = penalty(*plain.model, data(s)[m]);
        outputs[0].backward();
        EXPECT_TRUE(same(values(made[m]), values(outputs))) << "step " << s;
      }
      EXPECT_TRUE(same(all_gradients(*mine.model), all_gradients(*plain.model))) << "step " << s;
    }
    EXPECT_EQ(engine.report().eager_calls, 1);
  }
}

TEST_F(WholeStepWeightsTest, EagerRunsHoldNoLeavesThatTheyMake) {
  Trainer mine(device_);
  OffloadEngine engine(*mine.model, Options(device_));
  GraphedStep step = make_graphed_step(engine, Callable("step", &penalty, mine.model), {data(90)[0]});
  mine.model->eval();  // each run is eager from here on
  (void)step({data(0)[0]});
  const std::int64_t before = memory_use(device_).live;
  for (std::int64_t s = 1; s < 30; ++s) {
    (void)step({data(s)[0]});
  }
  EXPECT_TRUE(eventually([&] { return memory_use(device_).live <= before; }));
}

}  // namespace
}  // namespace sidestream::testing_model
