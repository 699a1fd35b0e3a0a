// Parameters that are parts of one buffer, and gradients that are, as distributed optimizers keep them: each is still a tensor of its own.
#include <cstdint>
#include <memory>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include "expect_throws.h"
#include "guard_models.h"
#include "sidestream/adamw.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/graphed_step.h"

namespace sidestream::testing_model {
namespace {

/// Gives the last weight other memory, outside of the buffer, and twice its values.
void double_elsewhere(PartModel& model) {
  at::Tensor weight = model.part(2).fc2->weight;
  weight.set_data(weight.detach() * 2);
}

class FlatParameters : public testing::Test {
 protected:
  [[nodiscard]] Options options() const { return Options(device_).min_bytes(64).graph("**").offload("**"); }
  [[nodiscard]] Twins<PartModel>::Act training() const {
    return [this](PartModel& model, std::int64_t s) {
      model.forward(part_input(model, s, device_)).square().mean().backward();
    };
  }

  c10::Device device_ = find_device("sim");
};

TEST_F(FlatParameters, AreNoticedOneByOne) {
  Twins<PartModel> twins(options());
  flatten_parameters(*twins.mine);
  twins.expect_plain(0, 3, training());
  EXPECT_EQ(twins.replays(), 6);
  EXPECT_EQ(twins.captures(), 6);
  for (const bool on : {false, true}) {
    twins.both([&](PartModel& model) { model.part(1).fc1->weight.set_requires_grad(on); });
    twins.expect_plain(3, 6, training());
    EXPECT_EQ(twins.replays(), 6);
  }
  flatten_parameters(*twins.mine);
  twins.expect_plain(6, 9, training());
  EXPECT_EQ(twins.replays(), 6);
  twins.both(double_elsewhere);
  twins.expect_plain(9, 12, training());
  EXPECT_EQ(twins.replays(), 6);
}

TEST_F(FlatParameters, AParameterOfAnotherModuleIsNoticedToo) {
  for (const bool flat : {false, true}) {
    Twins<PartModel> twins(options());
    if (flat) {
      flatten_parameters(*twins.mine);
    }
    const auto act = [this](PartModel& model, std::int64_t s) {
      const at::Tensor h = part_input(model, s, device_);
      call("reader", owning([](PartModel& of, const at::Tensor& x) {
             return at::linear(at::linear(x, of.part(0).fc1->weight).tanh(), of.part(2).fc2->weight);
           }),
           model, call(&model.part(0), h))
          .square()
          .mean()
          .backward();
    };
    twins.expect_plain(0, 4, act);
    EXPECT_EQ(twins.replays(), 4) << flat;
    for (const bool on : {false, true}) {
      twins.both([&](PartModel& model) { model.part(2).fc2->weight.set_requires_grad(on); });
      twins.expect_plain(4, 7, act);
      EXPECT_EQ(twins.replays(), 4) << flat;
    }
    twins.both(double_elsewhere);
    twins.expect_plain(7, 10, act);
    EXPECT_EQ(twins.replays(), 4) << flat;
  }
}

TEST_F(FlatParameters, AFrozenOneThatAClosureReadsIsNoticedToo) {
  for (const bool flat : {false, true}) {
    Twins<PartModel> twins(options());
    if (flat) {
      flatten_parameters(*twins.mine);
    }
    const auto reader_of = [](PartModel& model) {
      return owning([weight = model.part(2).fc2->weight](torch::nn::LinearImpl& linear, const at::Tensor& x) {
        return at::linear(linear.forward(x).tanh(), weight);
      });
    };
    const auto mine = reader_of(*twins.mine);
    const auto plain = reader_of(*twins.plain);
    const auto act = [&](PartModel& model, std::int64_t s) {
      const at::Tensor x = part_input(model, s, device_);
      call("reader", &model == twins.mine.get() ? mine : plain, *model.part(0).fc1, x).square().mean().backward();
    };
    const auto switch_weight = [&](bool on) {
      twins.both([&](PartModel& model) { model.part(2).fc2->weight.set_requires_grad(on); });
    };
    switch_weight(false);
    twins.expect_plain(0, 3, act);
    EXPECT_EQ(twins.replays(), 2) << flat;
    switch_weight(true);
    twins.expect_plain(3, 6, act);
    EXPECT_EQ(twins.replays(), 2) << flat;
    switch_weight(false);
    twins.expect_plain(6, 9, act);
    twins.both(double_elsewhere);
    twins.expect_plain(9, 12, act);
    EXPECT_EQ(twins.replays(), 2) << flat;
  }
}

TEST_F(FlatParameters, OneThatIsChangedInPlaceIsNamed) {
  Twins<PartModel> twins(options());
  flatten_parameters(*twins.mine);
  twins.expect_plain(0, 3, training());
  EXPECT_THROWS(UsageError,
                "\"parts.1\": \"fc2.weight\", which its backward needs, has been modified by an inplace operation",
                in_step(&*twins.engine, [&] {
                  const at::Tensor loss = twins.mine->forward(part_input(*twins.mine, 4, device_)).square().mean();
                  {
                    const at::NoGradGuard no_grad;
                    twins.mine->part(1).fc2->weight.mul_(1);
                  }
                  loss.backward();
                }));
}

TEST_F(FlatParameters, OfNoModuleTheyAreNoticedWithoutBackwardsToo) {
  for (const bool flat : {false, true}) {
    PartModel model;
    model.to(device_);
    OffloadEngine engine(model, options().call_options(CallOptions().on_evaluation(OnEvaluation::capture)));
    const at::Tensor buffer = at::linspace(-1, 1, 128, c10::TensorOptions(device_));
    at::Tensor first = at::zeros({8, 8}, device_).requires_grad_(true);
    at::Tensor second = at::zeros({8, 8}, device_).requires_grad_(true);
    first.set_data(buffer.slice(0, 0, 64).view({8, 8}));
    second.set_data((flat ? buffer : buffer.clone()).slice(0, 64).view({8, 8}));
    const auto body = [first, second](const at::Tensor& x) { return at::linear(at::linear(x, first).tanh(), second); };
    const auto reads = owning(body);
    for (const int scale : {1, 2, -3}) {
      if (scale != 1) {
        second.set_data(second.detach() * scale);
      }
      for (const int s : {0, 1, 2}) {
        const at::NoGradGuard no_grad;
        const auto step = engine.step();
        const at::Tensor x = at::full({4, 8}, 1.0 + s, device_);
        const at::Tensor y = call("reads", reads, x);
        EXPECT_TRUE(at::equal(y.cpu(), body(x).cpu())) << flat << ", scale " << scale << ", step " << s;
      }
    }
    EXPECT_GT(engine.report().replays, 0);
  }
}

TEST_F(FlatParameters, GradientsStayInTheirBuffer) {
  for (const GradientPolicy policy : {GradientPolicy::cloned, GradientPolicy::accumulated, GradientPolicy::owned}) {
    PartModel mine;
    PartModel plain;
    mine.to(device_);
    plain.to(device_);
    flatten_parameters(mine);
    const auto give = [](at::Tensor& parameter, const at::Tensor& part) { parameter.mutable_grad() = part; };
    const at::Tensor gradients = in_one_buffer(mine, give);
    const at::Tensor expected = in_one_buffer(plain, give);
    OffloadEngine engine(mine, options().graph_options(GraphOptions().gradients("**", policy)));
    for (std::int64_t s = 0; s < 5; ++s) {
      gradients.zero_();
      expected.zero_();
      for (PartModel* const model : {&mine, &plain}) {
        torch::manual_seed(static_cast<std::uint64_t>(s));
        in_step(model == &mine ? &engine : nullptr, [&] {
          for (std::int64_t m = 0; m < 2; ++m) {
            training()(*model, 2 * s + m);
          }
        });
      }
      EXPECT_TRUE(at::equal(gradients.cpu(), expected.cpu()))
          << "step " << s << ", policy " << static_cast<int>(policy);
      for (const at::Tensor& parameter : mine.parameters()) {
        EXPECT_TRUE(parameter.grad().is_alias_of(gradients)) << "policy " << static_cast<int>(policy);
      }
      descend(mine);
      descend(plain);
    }
    EXPECT_GT(engine.report().replays, 0);
  }
}

TEST_F(FlatParameters, AWholeStepTrainsThem) {
  const auto mine = std::make_shared<PartModel>();
  const auto plain = std::make_shared<PartModel>();
  mine->to(device_);
  plain->to(device_);
  flatten_parameters(*mine);
  const auto loss_of = [](PartModel& model, const Tensors& in) -> Tensors {
    return {model.forward(in[0]).square().mean()};
  };
  OffloadEngine engine(*mine, Options(device_).min_bytes(64).offload("**"));
  AdamW updated(mine->parameters(), 0.01);
  AdamW expected(plain->parameters(), 0.01);
  const GraphedStep step =
      make_graphed_step(engine, Callable("step", loss_of, mine), {{part_input(*mine, 90, device_)}},
                        StepOptions().update([&] { updated.step(); }));
  for (std::int64_t s = 0; s < 5; ++s) {
    torch::manual_seed(static_cast<std::uint64_t>(s));
    step({{part_input(*mine, s, device_)}});
    torch::manual_seed(static_cast<std::uint64_t>(s));
    plain->zero_grad();
    loss_of(*plain, {part_input(*plain, s, device_)})[0].backward();
    expected.step();
    EXPECT_TRUE(same(gradients_and_buffers(*mine), gradients_and_buffers(*plain))) << "step " << s;
    EXPECT_TRUE(same(values(mine->parameters()), values(plain->parameters()))) << "step " << s;
  }
}

}  // namespace
}  // namespace sidestream::testing_model
