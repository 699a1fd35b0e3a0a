// A training whose replays are verified is the training that it is without: gradients, buffers, draws and offload.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "autocast_region.h"
#include "models/block_model.h"
#include "models/ruled_model.h"
#include "models/stack_twins.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"

namespace sidestream::testing_model {
namespace {

constexpr std::int64_t kVerifiedSteps = 8;

class VerifiedTrainingTest : public testing::Test {
 protected:
  [[nodiscard]] Options verifying() const { return Options(device_).min_bytes(64).verify_replays(1000); }
  [[nodiscard]] at::Generator generator() const { return at::globalContext().defaultGenerator(device_); }
  [[nodiscard]] at::Tensor random() const { return generator().get_state(); }

  c10::Device device_ = find_device("sim");
};

class VerifiedBlocksTest : public VerifiedTrainingTest, public testing::WithParamInterface<GradientPolicy> {
 protected:
  [[nodiscard]] BlockTraining train(const Options& options) const {
    return {shape_, device_, kVerifiedSteps,
            [&](BlockModel& model) { return std::make_unique<OffloadEngine>(model, options); }};
  }
  BlockModel::Shape shape_ = [] {
    BlockModel::Shape shape;
    shape.dropout = 0.25;
    return shape;
  }();
};

TEST_P(VerifiedBlocksTest, OffloadedLinkedBlocksWithDropoutTrainAsPlainOnes) {
  const Options options = Options(device_)
                              .min_bytes(1024)
                              .graph("blocks.*")
                              .offload("blocks.*.*")
                              .graph_options(GraphOptions().gradients("**", GetParam()));
  const BlockTraining plain(shape_, device_, kVerifiedSteps);
  const at::Tensor drawn = random();
  const BlockTraining verified = train(Options(options).verify_replays(1000));
  expect_plain(verified, plain);
  EXPECT_TRUE(at::equal(random(), drawn));
  EXPECT_EQ(verified.report.verified_forwards, kVerifiedSteps - 1);
  EXPECT_EQ(verified.report.verified_backwards, kVerifiedSteps - 1);
  const BlockTraining without = train(options);
  EXPECT_EQ(verified.report.offloaded_bytes, without.report.offloaded_bytes);
  EXPECT_EQ(verified.report.reloaded_bytes, without.report.reloaded_bytes);
  EXPECT_EQ(verified.report.pinned_bytes, without.report.pinned_bytes);
  EXPECT_EQ(verified.report.eager_calls, without.report.eager_calls);
  EXPECT_EQ(verified.report.inline_reloads, 0);
}

TEST_P(VerifiedBlocksTest, TheOrderOfItsWorkIsChecked) {
  const BlockTraining verified = train(Options(device_)
                                           .min_bytes(1024)
                                           .graph("blocks.*")
                                           .offload("blocks.*.*")
                                           .check_steps(kVerifiedSteps)
                                           .graph_options(GraphOptions().gradients("**", GetParam()))
                                           .verify_replays(1000));
  EXPECT_EQ(verified.report.order_findings, std::vector<std::string>());
  EXPECT_GT(verified.report.checked_operations, 0);
  EXPECT_EQ(verified.report.verified_backwards, kVerifiedSteps - 1);
}

INSTANTIATE_TEST_SUITE_P(Policies, VerifiedBlocksTest,
                         testing::Values(GradientPolicy::cloned, GradientPolicy::accumulated));

TEST_F(VerifiedTrainingTest, BatchNormAndDropoutInCallables) {
  StackTwins stacks(device_, 3, {.dropout = 0.3, .batch_norm = true});
  stacks.capture(verifying().offload("layers.*.*"), {});
  const auto step = [&](bool graphed, std::int64_t s) {
    generator().set_current_seed(static_cast<std::uint64_t>(100 + s));
    StepTensors result = stacks.step(graphed, s);
    result.emplace_back("random state", random());
    return result;
  };
  testing_model::expect_plain(
      0, kVerifiedSteps, [&](std::int64_t s) { return step(true, s); }, [&](std::int64_t s) { return step(false, s); });
  EXPECT_EQ(stacks.engine->report().verified_backwards, kVerifiedSteps);
}

/// A training of RuledModels by ss::call, and of their plain twins.
class VerifiedRulesTest : public VerifiedTrainingTest {
 protected:
  using Run = std::function<void(RuledModel& model, std::int64_t s)>;

  void make(const RuledLayer::Rule& rule, std::int64_t layers = 2) {
    mine_ = std::make_unique<RuledModel>(layers, rule, device_);
    plain_ = std::make_unique<RuledModel>(layers, rule, device_);
  }
  [[nodiscard]] at::Tensor data(std::int64_t s) const {
    return rows(s, device_).slice(1, 0, RuledLayer::kWidth).contiguous();
  }
  void expect_plain(OffloadEngine& engine, const Run& run) {
    const auto step = [&](RuledModel& model, OffloadEngine* of, std::int64_t s) {
      generator().set_current_seed(static_cast<std::uint64_t>(100 + s));
      StepTensors result = train_step(model, of, [&] { run(model, s); });
      result.emplace_back("random state", random());
      for (std::int64_t i = 0; i < static_cast<std::int64_t>(model.layers->size()); ++i) {
        result.emplace_back("unregistered", model.layer(i).unregistered);
      }
      return result;
    };
    testing_model::expect_plain(
        0, kVerifiedSteps, [&](std::int64_t s) { return step(*mine_, &engine, s); },
        [&](std::int64_t s) { return step(*plain_, nullptr, s); });
  }

  std::unique_ptr<RuledModel> mine_;
  std::unique_ptr<RuledModel> plain_;
};

TEST_F(VerifiedRulesTest, MicrobatchesInFlight) {
  make([](RuledLayer& l, const at::Tensor& x) { return at::dropout(x * l.weight, 0.2, true).tanh() + l.extra; });
  OffloadEngine engine(*mine_, verifying().graph("layers.*"));
  expect_plain(engine, [&](RuledModel& model, std::int64_t s) {
    const at::Tensor a = model.forward(data(2 * s)).sum();
    const at::Tensor b = model.forward(data(2 * s + 1)).square().sum();
    (s % 2 == 0 ? a : b).backward();
    (s % 2 == 0 ? b : a).backward();
  });
  EXPECT_EQ(engine.report().verified_backwards, kVerifiedSteps - 1);
}

TEST_F(VerifiedRulesTest, MicrobatchesOneAfterTheOther) {
  make([](RuledLayer& l, const at::Tensor& x) { return (x * l.weight).tanh() + l.extra; });
  OffloadEngine engine(*mine_, verifying().graph("layers.*"));
  expect_plain(engine, [&](RuledModel& model, std::int64_t s) {
    model.forward(data(2 * s)).sum().backward();
    model.forward(data(2 * s + 1)).square().sum().backward();
  });
  EXPECT_EQ(engine.report().verified_backwards, kVerifiedSteps - 1);
}

TEST_F(VerifiedRulesTest, BuffersAndTensorsThatTheBodyWrites) {
  make([](RuledLayer& l, const at::Tensor& x) {
    const at::Tensor y = x * l.weight + l.running;
    {
      const at::NoGradGuard no_grad;
      l.running = l.named_buffers()["running"];
      l.running.mul_(0.5).add_(y.mean(0), 0.5);
      l.unregistered.add_(y.abs().mean(0));
    }
    return y.tanh();
  });
  OffloadEngine engine(*mine_, verifying().graph("layers.*"));
  expect_plain(engine, [&](RuledModel& model, std::int64_t s) {
    for (std::int64_t i = 0; i < 2 && s > 0; ++i) {
      model.layer(i).unregistered.zero_();
    }
    model.forward(data(s)).mean().backward();
  });
  EXPECT_EQ(engine.report().verified_backwards, kVerifiedSteps - 1);
}

TEST_F(VerifiedRulesTest, AWeightOfSeveralLayersAndOfAnEagerHead) {
  make([](RuledLayer& l, const at::Tensor& x) { return (x * l.weight).tanh() + l.extra; });
  for (RuledModel* model : {mine_.get(), plain_.get()}) {
    model->layer(1).weight =
        model->layer(1).register_module("tied", model->layers->ptr(0))->named_parameters()["weight"];
  }
  OffloadEngine engine(*mine_, verifying().graph("layers.*"));
  expect_plain(engine, [&](RuledModel& model, std::int64_t s) {
    (model.forward(data(s)) * model.layer(0).weight).sum().backward();
  });
  EXPECT_EQ(engine.report().verified_backwards, kVerifiedSteps - 1);
}

TEST_F(VerifiedRulesTest, HooksOfParametersRunOnce) {
  make([](RuledLayer& l, const at::Tensor& x) { return (x * l.weight).tanh() + l.extra; });
  std::int64_t runs = 0;
  for (RuledModel* model : {mine_.get(), plain_.get()}) {
    model->layer(0).weight.register_hook([&runs, model, this](const at::Tensor& grad) {
      runs += model == mine_.get() ? 1 : 0;
      return grad * 2;
    });
  }
  OffloadEngine engine(*mine_, verifying().graph("layers.0"));
  expect_plain(engine, [&](RuledModel& model, std::int64_t s) { model.forward(data(s)).sum().backward(); });
  EXPECT_EQ(runs, kVerifiedSteps);
  EXPECT_EQ(engine.report().verified_backwards, kVerifiedSteps - 1);
}

TEST_F(VerifiedRulesTest, AnOutputThatIsNotUsed) {
  make([](RuledLayer& l, const at::Tensor& x) { return x * l.weight; });
  OffloadEngine engine(*mine_, verifying().graph("both"));
  expect_plain(engine, [&](RuledModel& model, std::int64_t s) {
    const auto [used, unused] = call(
        "both",
        [](const at::Tensor& x, RuledLayer& layer) {
          return std::make_tuple(layer.forward(x).tanh(), (x + layer.weight).tanh());
        },
        data(s).requires_grad_(true), model.layer(0));
    (s % 2 == 0 ? used : used + unused).sum().backward();
  });
  EXPECT_EQ(engine.report().verified_backwards, kVerifiedSteps - 1);
}

TEST_F(VerifiedRulesTest, ASecondBackwardOfOneForward) {
  make([](RuledLayer& l, const at::Tensor& x) { return (x * l.weight).tanh() + l.extra; });
  OffloadEngine engine(*mine_,
                       verifying().graph("layers.*").graph_options(GraphOptions().retain_graph_in_backward(true)));
  expect_plain(engine, [&](RuledModel& model, std::int64_t s) {
    const at::Tensor loss = model.forward(data(s)).mean();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
  });
  EXPECT_EQ(engine.report().verified_backwards, kVerifiedSteps - 1);
}

TEST_F(VerifiedRulesTest, AWeightThatAutocastCastsOutsideOfTheCallAsWell) {
  make([](RuledLayer& l, const at::Tensor& x) { return at::linear(x, at::diag_embed(l.weight)).tanh() + l.extra; });
  const auto head = at::randn({RuledLayer::kWidth, RuledLayer::kWidth}, device_);
  at::Tensor heads[2] = {head.clone().requires_grad_(true), head.clone().requires_grad_(true)};
  at::Tensor grads[2];
  OffloadEngine engine(*mine_, verifying().graph("layers.*"));
  expect_plain(engine, [&](RuledModel& model, std::int64_t s) {
    const std::size_t which = &model == mine_.get() ? 0 : 1;
    at::Tensor h;
    {
      const AutocastRegion autocast(device_.type());
      h = at::linear(data(s), heads[which]);
      h = model.forward(h.to(at::kFloat));
      h = at::linear(h, heads[which]);
    }
    h.to(at::kFloat).square().sum().backward();
    grads[which] = heads[which].grad().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
    heads[which].mutable_grad() = at::Tensor();
    if (which == 0) {  // the twin's step came before
      EXPECT_TRUE(at::equal(grads[0], grads[1])) << "step " << s;
    }
  });
  EXPECT_EQ(engine.report().verified_backwards, kVerifiedSteps - 1);
}

}  // namespace
}  // namespace sidestream::testing_model
