#include "sidestream/graphed_step.h"

#include <optional>
#include <string>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include "sidestream/testing/simulator.h"
#include "unit/graphs/graphed_step_fixture.h"

namespace sidestream::testing_model {
namespace {

constexpr std::int64_t kWholeSteps = 5;

class WholeStepTest : public testing::TestWithParam<WholeStepTrainer::Form> {
 protected:
  /// Step `s` of both, with the same random numbers, gives the same.
  static void expect_plain_step(WholeStepTrainer& mine, WholeStepTrainer& plain, std::int64_t s) {
    torch::manual_seed(100 + s);
    const StepTensors got = mine.run(s);
    torch::manual_seed(100 + s);
    EXPECT_TRUE(same(got, plain.run(s))) << "step " << s;
    if (!mine.form.updates) {
      descend(*mine.model);
      descend(*plain.model);
    }
  }

  c10::Device device_ = find_device("sim");
};

TEST_P(WholeStepTest, TrainsAsPlainStepsDo) {
  WholeStepTrainer mine(device_, GetParam());
  WholeStepTrainer plain(device_, GetParam());
  torch::manual_seed(5);
  const at::Tensor drawn = at::rand({4}, device_);
  torch::manual_seed(5);
  mine.graph(Options(device_));
  EXPECT_TRUE(at::equal(at::rand({4}, device_).cpu(), drawn.cpu())) << "the capture moved the generator on";
  for (const auto& [name, tensor] : mine.optimizer.named_state()) {
    EXPECT_EQ(tensor.cpu().abs().sum().item<double>(), 0) << name << " is not as before the capture";
  }
  for (std::int64_t s = 0; s < kWholeSteps; ++s) {
    if (mine.form.updates) {
      mine.optimizer.set_lr(1e-2 / static_cast<double>(s + 1));
      plain.optimizer.set_lr(1e-2 / static_cast<double>(s + 1));
    }
    expect_plain_step(mine, plain, s);
  }
  EXPECT_EQ(mine.step->captures(), 1U);
}

// Autograd makes a gradient on the stream of its operator's forward. The step copies it on the stream that the step runs on.
TEST(WholeStepStreamsTest, GradientsOfAStreamOfTheFunctionsOwn) {
  const c10::Device device = find_device("sim");
  const auto loss = [](torch::nn::SequentialImpl& model, const Tensors& inputs) {
    const c10::Device device = inputs[0].device();
    const c10::impl::VirtualGuardImpl streams(device.type());
    const c10::Stream main = streams.getStream(device);
    const c10::Stream side = streams.getStreamFromGlobalPool(device);
    c10::Event forked(device.type());
    c10::Event joined(device.type());
    const at::Tensor x = inputs[0].clone();
    forked.record(main);
    forked.block(side);
    at::Tensor y;
    {
      const c10::StreamGuard guard(side);
      y = model.forward(x);
    }
    x.record_stream(side);
    y.record_stream(main);
    joined.record(side);
    joined.block(main);
    return Tensors{(y * inputs[1]).sum()};
  };
  const Tensors inputs{rows(0, device), rows(0, device, 1)};
  torch::nn::Sequential plain = layer_stack(1, device);
  loss(*plain, inputs)[0].backward();
  const StepTensors expected = gradients(*plain);
  for (int seed = 0; seed < 20; ++seed) {
    set_schedule(device, Schedule::parse("seed:" + std::to_string(seed)));
    torch::nn::Sequential model = layer_stack(1, device);
    OffloadEngine engine(*model, Options(device));
    const GraphedStep step = make_graphed_step(engine, Callable("step", loss, model.ptr()), {inputs});
    for (int i = 0; i < 4; ++i) {
      (void)step({inputs});
      EXPECT_TRUE(same(gradients(*model), expected)) << "seed " << seed << ", step " << i;
    }
    set_schedule(device, Schedule());
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, WholeStepTest,
                         testing::Values(WholeStepTrainer::Form{}, WholeStepTrainer::Form{.microbatches = 3},
                                         WholeStepTrainer::Form{.updates = true},
                                         WholeStepTrainer::Form{.microbatches = 2, .updates = true},
                                         WholeStepTrainer::Form{.microbatches = 2, .accumulate = true},
                                         WholeStepTrainer::Form{.microbatches = 2, .updates = true, .accumulate = true},
                                         WholeStepTrainer::Form{.microbatches = 2,
                                                                .extras = {.dropout = 0.2, .batch_norm = true},
                                                                .updates = true}));

/// With what the options name leaving inside of the graph.
class OffloadedWholeStepTest : public WholeStepTest {};

TEST_P(OffloadedWholeStepTest, TrainsAsPlainStepsDo) {
  for (const std::optional<std::size_t> lag : {std::optional<std::size_t>(), std::optional<std::size_t>(0)}) {
    WholeStepTrainer mine(device_, GetParam());
    WholeStepTrainer plain(device_, GetParam());
    Options options = Options(device_).offload("**").min_bytes(1024);
    if (lag) {
      options.lag(*lag);
    }
    mine.graph(options);
    EXPECT_GT(mine.step->offloaded_bytes(), 16U * 32 * 4 * static_cast<std::uint64_t>(mine.form.microbatches));
    for (std::int64_t s = 0; s < kWholeSteps; ++s) {
      expect_plain_step(mine, plain, s);
    }
    EXPECT_GT(mine.engine->report().pinned_bytes, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, OffloadedWholeStepTest,
                         testing::Values(WholeStepTrainer::Form{.layers = 5},
                                         WholeStepTrainer::Form{.layers = 4, .microbatches = 3, .updates = true},
                                         WholeStepTrainer::Form{.microbatches = 2,
                                                                .extras = {.dropout = 0.2, .batch_norm = true},
                                                                .accumulate = true}));

using OneWholeStepTest = WholeStepTest;

TEST_F(OneWholeStepTest, FollowsRelocatedWeightsAndOtherShapesWithAndWithoutOffload) {
  for (const bool offloads : {false, true}) {
    WholeStepTrainer mine(device_, {.layers = 4});
    WholeStepTrainer plain(device_, {.layers = 4});
    mine.graph(offloads ? Options(device_).offload("**").min_bytes(512) : Options(device_),
               StepOptions().max_captures(2));
    for (std::int64_t s = 0; s < 6; ++s) {
      if (s == 2 || s == 4) {
        relocate(*mine.model);
      }
      const std::int64_t some = s % 2 == 0 ? 16 : 8;
      const std::vector<Tensors> batch{{rows(s, device_).narrow(0, 0, some), rows(s, device_, 1).narrow(0, 0, some)}};
      EXPECT_TRUE(same(mine.run(batch), plain.run(batch))) << "step " << s;
      EXPECT_EQ(mine.step->offloaded_bytes() > 0, offloads);
    }
    EXPECT_GT(mine.engine->report().recaptures, 0);
  }
}

TEST_F(OneWholeStepTest, LeavesNothingWhereTheOptionSaysSo) {
  WholeStepTrainer mine(device_, {.layers = 4});
  mine.graph(Options(device_).offload("**").min_bytes(512), StepOptions().offload(false));
  (void)mine.run(0);
  EXPECT_EQ(mine.step->offloaded_bytes(), 0U);
}

TEST_F(OneWholeStepTest, CapturesOtherShapesThenAndThere) {
  WholeStepTrainer mine(device_, {.updates = true});
  WholeStepTrainer plain(device_, {.updates = true});
  mine.graph(Options(device_), StepOptions().max_captures(3));
  const auto batch = [&](std::int64_t s) -> std::vector<Tensors> {
    const std::int64_t some = s % 3 == 1 ? 8 : 16;
    std::vector<Tensors> all{{rows(s, device_).narrow(0, 0, some), rows(s, device_, 1).narrow(0, 0, some)}};
    if (s % 3 == 2) {
      all.push_back({rows(s, device_, 2), rows(s, device_, 3)});
    }
    return all;
  };
  for (std::int64_t s = 0; s < 8; ++s) {
    EXPECT_TRUE(same(mine.run(batch(s)), plain.run(batch(s)))) << "step " << s;
  }
  EXPECT_EQ(mine.step->captures(), 3U);
}

TEST_F(OneWholeStepTest, AddsToGradientsOfEagerStepsAndOfOtherGraphs) {
  WholeStepTrainer mine(device_, {.accumulate = true});
  WholeStepTrainer plain(device_, {.accumulate = true});
  mine.graph(Options(device_));
  const auto eagerly = [](WholeStepTrainer& trainer, std::int64_t s) {
    stack_loss(*trainer.model, trainer.data(s)[0])[0].backward();
  };
  GraphedStep other = make_graphed_step(*mine.engine, Callable("other", &stack_loss, mine.model), mine.data(7),
                                        StepOptions().accumulate(true));
  for (std::int64_t s = 0; s < 3; ++s) {
    eagerly(mine, 10 + s);
    eagerly(plain, 10 + s);
    EXPECT_TRUE(same(mine.run(s), plain.run(s))) << "behind an eager backward, step " << s;
    (void)other(mine.data(20 + s));
    eagerly(plain, 20 + s);
    EXPECT_TRUE(same(mine.run(30 + s), plain.run(30 + s))) << "behind another graph, step " << s;
    descend(*mine.model);
    descend(*plain.model);
    mine.model->zero_grad(/*set_to_none=*/s != 1);
    plain.model->zero_grad(/*set_to_none=*/s != 1);
  }
}

TEST_F(OneWholeStepTest, AddsToGradientsThatOtherGraphsGaveOut) {
  WholeStepTrainer mine(device_, {.accumulate = true});
  WholeStepTrainer plain(device_, {.accumulate = true});
  mine.graph(Options(device_));
  const auto layers =
      graph_stack(*mine.engine, mine.model, device_, GraphOptions().gradients("**", GradientPolicy::owned));
  for (std::int64_t s = 0; s < 3; ++s) {
    const Tensors inputs = mine.data(10 + s)[0];
    (run_stack(layers, inputs[0].detach().requires_grad_(true)) * inputs[1]).sum().backward();
    stack_loss(*plain.model, inputs)[0].backward();
    EXPECT_TRUE(same(mine.run(s), plain.run(s))) << "step " << s;
    mine.model->zero_grad();
    plain.model->zero_grad();
  }
}

TEST_F(OneWholeStepTest, TiedWeightsAndWeightsOutsideOfTheModuleGetTheirGradients) {
  struct Tied {
    explicit Tied(c10::Device device)
        : model(layer_stack(2, device)), scale(at::full({}, 1.5, device).requires_grad_(true)) {}
    Tensors loss(const Tensors& inputs) {
      const at::Tensor first = model->parameters()[1];
      at::Tensor y = model->forward(inputs[0]) * scale;
      return {(y * inputs[1]).sum() + (model->forward(y) * inputs[1]).sum() + first.square().sum()};
    }
    torch::nn::Sequential model;
    at::Tensor scale;
  };
  auto mine = std::make_shared<Tied>(device_);
  Tied plain(device_);
  OffloadEngine engine(*mine->model, Options(device_));
  const auto data = [&](std::int64_t s) { return Tensors{rows(s, device_), rows(s, device_, 1)}; };
  GraphedStep step = make_graphed_step(
      engine, Callable("tied", owning([mine](const Tensors& inputs) { return mine->loss(inputs); })), {data(9)});
  for (std::int64_t s = 0; s < 3; ++s) {
    plain.model->zero_grad();
    plain.scale.mutable_grad() = at::Tensor();
    const at::Tensor loss = plain.loss(data(s))[0];
    loss.backward();
    const std::vector<Tensors> got = step({data(s)});
    EXPECT_TRUE(at::equal(got[0][0].cpu(), loss.detach().cpu()));
    EXPECT_TRUE(same(gradients(*mine->model), gradients(*plain.model)));
    EXPECT_TRUE(at::equal(mine->scale.grad().cpu(), plain.scale.grad().cpu()));
    descend(*mine->model);
    descend(*plain.model);
  }
}

TEST_F(OneWholeStepTest, FrozenParametersGetNoGradient) {
  WholeStepTrainer mine(device_, {});
  WholeStepTrainer plain(device_, {});
  for (auto* trainer : {&mine, &plain}) {
    trainer->model->parameters()[0].requires_grad_(false);
  }
  mine.graph(Options(device_));
  for (std::int64_t s = 0; s < 3; ++s) {
    EXPECT_TRUE(same(mine.run(s), plain.run(s))) << "step " << s;
    EXPECT_FALSE(mine.model->parameters()[0].grad().defined());
  }
}

TEST_F(OneWholeStepTest, GivesWhatAnEagerRunInAnotherModeGives) {
  torch::nn::Sequential model = layer_stack(2, device_);
  OffloadEngine engine(*model, Options(device_));
  const auto loss = [](torch::nn::SequentialImpl& m, const Tensors& in) {
    const at::Tensor y = m.forward(in[0]);
    const at::Tensor loss = (y * in[1]).sum();
    return m.is_training() ? Tensors{loss, y, y.sum()} : Tensors{loss};
  };
  const auto data = [&](std::int64_t s) {
    return std::vector<Tensors>{{rows(s, device_), rows(s, device_, 1)}, {rows(s, device_, 2), rows(s, device_, 3)}};
  };
  GraphedStep step = make_graphed_step(engine, Callable("step", loss, model), data(9));
  for (std::int64_t s = 0; s < 4; ++s) {
    model->train(s % 2 == 0);
    const std::vector<Tensors> made = step(data(s));
    ASSERT_EQ(made.size(), 2U);
    for (std::size_t m = 0; m < 2; ++m) {
      ASSERT_EQ(made[m].size(), s % 2 == 0 ? 3U : 1U) << "step " << s;
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(at::equal(made[m][0].cpu(), loss(*model, data(s)[m])[0].cpu()))
          << "step " << s << ", microbatch " << m;
    }
  }
}

TEST_F(OneWholeStepTest, OutputsAreTheCallersOwn) {
  WholeStepTrainer mine(device_, {});
  mine.graph(Options(device_));
  const std::vector<Tensors> first = (*mine.step)(mine.data(0));
  const at::Tensor loss = first[0][0].cpu().clone();
  const std::vector<Tensors> second = (*mine.step)(mine.data(1));
  EXPECT_TRUE(at::equal(first[0][0].cpu(), loss));
  EXPECT_FALSE(at::equal(second[0][0].cpu(), loss));
  EXPECT_FALSE(first[0][0].requires_grad());
}

TEST_F(OneWholeStepTest, RunsEagerlyInAnotherTrainingMode) {
  WholeStepTrainer mine(device_, {.extras = {.dropout = 0.3}, .updates = true});
  WholeStepTrainer plain(device_, {.extras = {.dropout = 0.3}, .updates = true});
  mine.graph(Options(device_));
  for (std::int64_t s = 0; s < 4; ++s) {
    mine.model->train(s % 2 == 0);
    plain.model->train(s % 2 == 0);
    torch::manual_seed(s);
    const StepTensors got = mine.run(s);
    torch::manual_seed(s);
    EXPECT_TRUE(same(got, plain.run(s))) << "step " << s;
  }
}

}  // namespace
}  // namespace sidestream::testing_model
