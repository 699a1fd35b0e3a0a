#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "expect_throws.h"
#include "models/block_model.h"
#include "models/layer_stack.h"
#include "runtime/live_memory.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/owning.h"
#include "unit/graphs/call_fixture.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream::testing_model {
namespace {

BlockModel::Shape eight_layers() {
  BlockModel::Shape shape;
  shape.layers = 8;
  return shape;
}

/// Eight blocks in graphs; what they save may be offloaded.
class BudgetPlanTest : public testing::Test {
 protected:
  [[nodiscard]] Options options() const { return Options(device_).min_bytes(1024).graph("blocks.*"); }
  [[nodiscard]] BlockTraining train(const Options& options, std::int64_t steps = 7) const {
    return {eight_layers(), device_, steps,
            [&](BlockModel& model) { return std::make_unique<OffloadEngine>(model, options); }};
  }
  /// A budget that is `part` of the way from all offloaded to nothing offloaded.
  [[nodiscard]] std::size_t budget(double part) const {
    const std::int64_t most = train(options()).report.step_peak_bytes;
    const std::int64_t least = train(options().offload("all").lag(0)).report.step_peak_bytes;
    EXPECT_LT(least, most);
    return static_cast<std::size_t>(static_cast<double>(least) + part * static_cast<double>(most - least));
  }

  c10::Device device_ = find_device("sim");
};

TEST_F(BudgetPlanTest, StepsStayWithinTheBudgetAndAreAsForecast) {
  const BlockTraining plain(eight_layers(), device_, 7);
  std::int64_t offloaded = train(options().offload("all").lag(0)).report.offloaded_bytes;
  for (const double part : {0.1, 0.3, 0.5, 0.7, 0.9}) {
    const std::size_t bytes = budget(part);
    const BlockTraining within = train(options().device_budget(bytes));
    expect_plain(within, plain);
    const Report& report = within.report;
    EXPECT_LE(report.step_peak_bytes, static_cast<std::int64_t>(bytes)) << part;
    EXPECT_EQ(report.forecast_peak_bytes, report.step_peak_bytes) << part;
    EXPECT_EQ(report.forecast_step_peak_bytes, report.step_peak_bytes) << part;
    EXPECT_GT(report.offloaded_bytes, 0) << part;
    EXPECT_LE(report.offloaded_bytes, offloaded) << part;
    EXPECT_EQ(report.pinned_allocations_after_planning, 0);
    offloaded = report.offloaded_bytes;
  }
}

TEST_F(BudgetPlanTest, ABudgetForAllOffloadsNothing) {
  const BlockTraining within = train(options().device_budget(budget(1)));
  EXPECT_EQ(within.report.offloaded_bytes, 0);
  EXPECT_EQ(within.report.forecast_peak_bytes, within.report.step_peak_bytes);
}

TEST_F(BudgetPlanTest, OffloadsOnlyWhatIsNamed) {
  const BlockTraining within = train(options().offload("blocks.{0..2}.*").device_budget(budget(0.7)));
  expect_plain(within, BlockTraining(eight_layers(), device_, 7));
  EXPECT_GT(within.report.offloaded_bytes, 0);
  EXPECT_EQ(within.report.forecast_peak_bytes, within.report.step_peak_bytes);
  for (const GroupReport& group : within.report.groups) {
    EXPECT_TRUE(group.offloaded_bytes == 0 || group.name < "blocks.3") << group.name;
  }
}

/// Steps of two microbatches. `in_flight`: both forwards come first.
class BudgetOfMicrobatchesTest : public BudgetPlanTest, public testing::WithParamInterface<bool> {
 protected:
  static void run(BlockModel& model, std::int64_t s) {
    const at::Tensor first = model.loss_of(2 * s);
    if (!GetParam()) {
      first.backward();
    }
    const at::Tensor second = model.loss_of(2 * s + 1);
    second.backward();
    if (GetParam()) {
      first.backward();
    }
  }
  [[nodiscard]] Report train_twin(const Options& options) const {
    BlockModel model(eight_layers());
    BlockModel plain(eight_layers());
    model.to(device_);
    plain.to(device_);
    OffloadEngine engine(model, options);
    for (std::int64_t s = 0; s < 8; ++s) {
      expect_same_step(model, &engine, plain, s, [&](BlockModel& of) { run(of, s); });
    }
    return engine.report();
  }
};

TEST_P(BudgetOfMicrobatchesTest, StepsStayWithinTheBudget) {
  const std::int64_t most = train_twin(options()).step_peak_bytes;
  const std::int64_t least = train_twin(options().offload("all").lag(0)).step_peak_bytes;
  ASSERT_LT(least, most);
  for (const std::int64_t parts : {1, 2, 3}) {
    const std::int64_t bytes = least + parts * (most - least) / 4;
    const Report report = train_twin(options().device_budget(bytes));
    EXPECT_LE(report.step_peak_bytes, bytes) << parts;
    EXPECT_EQ(report.forecast_peak_bytes, report.step_peak_bytes) << parts;
    EXPECT_GT(report.offloaded_bytes, 0) << parts;
  }
}

INSTANTIATE_TEST_SUITE_P(Microbatches, BudgetOfMicrobatchesTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "in_flight" : "one_by_one"; });

/// What there is beside graphs while their calls are captured again.
enum class BesideCaptures : std::uint8_t { nothing, gradients, large_inputs };

class BudgetOfAllStepsTest : public testing::TestWithParam<BesideCaptures> {
 protected:
  struct Run {
    std::int64_t peak = 0;  ///< of live bytes, from the first step on: sizing, warm-ups and captures included
    Report report;
  };
  [[nodiscard]] Options options() const {
    const bool layers = GetParam() == BesideCaptures::large_inputs;
    return Options(device_).min_bytes(1024).graph(layers ? "layers.*" : "blocks.*");
  }
  [[nodiscard]] Run run(const Options& options) const {
    if (GetParam() != BesideCaptures::large_inputs) {
      BlockModel model(eight_layers());
      model.to(device_);
      return run(options, model, [&](std::int64_t s) { model.loss_of(s).backward(); });
    }
    torch::nn::Module model;
    torch::nn::Sequential layers = layer_stack(8, device_);
    model.register_module("layers", layers.ptr());
    const at::Tensor x = rows(0, device_).repeat({64, 1});
    return run(options, model, [&](std::int64_t /*s*/) {
      at::Tensor h = x;
      for (std::size_t i = 0; i < layers->size(); ++i) {
        h = call(&layers->at<Mlp>(i), h);
      }
      h.sum().backward();
    });
  }
  [[nodiscard]] Run run(const Options& options, torch::nn::Module& model,
                        const std::function<void(std::int64_t s)>& train) const {
    OffloadEngine engine(model, options);
    const std::shared_ptr<Runtime> runtime = make_runtime(device_);
    LiveMemory::Measurement memory(*runtime);
    const bool unset_in_step = GetParam() == BesideCaptures::gradients;
    for (std::int64_t s = 0; s < 6; ++s) {
      if (!unset_in_step) {
        clear_gradients(model);
      }
      const auto step = engine.step();
      if (unset_in_step) {
        clear_gradients(model);
      }
      train(s);
    }
    return {memory.peak().live, engine.report()};
  }

  sim::OneThread one_thread_;  // autograd's own lets go of the last tensors of a backward a moment later
  c10::Device device_ = find_device("sim");
};

TEST_P(BudgetOfAllStepsTest, TheForecastIsABudgetThatNoStepExceedsOrThatIsRefused) {
  const std::int64_t most = run(options()).report.step_peak_bytes;
  const std::int64_t least = run(options().offload("all").lag(0)).report.step_peak_bytes;
  int refused = 0;
  for (const std::int64_t tenths : {1, 3, 5, 7, 9, 10}) {
    std::int64_t budget = least + tenths * (most - least) / 10;
    for (const bool again : {false, true}) {
      try {
        const Run within = run(options().device_budget(static_cast<std::size_t>(budget)));
        EXPECT_LE(within.peak, budget) << tenths << ", " << again;
        EXPECT_GT(within.report.forecast_peak_bytes, 0) << tenths << ", " << again;
        EXPECT_EQ(within.report.forecast_peak_bytes, within.report.step_peak_bytes) << tenths << ", " << again;
        budget = within.report.forecast_peak_bytes;
      } catch (const UsageError& error) {
        EXPECT_NE(std::string(error.what()).find("unset gradients before OffloadEngine::step"), std::string::npos)
            << error.what();
        ++refused;
        break;
      }
    }
  }
  EXPECT_EQ(refused > 0, GetParam() == BesideCaptures::gradients);
}

std::string name_of_beside(const testing::TestParamInfo<BesideCaptures>& info) {
  const std::vector<std::string> names{"nothing", "gradients", "large_inputs"};
  return names[static_cast<std::size_t>(info.param)];
}

INSTANTIATE_TEST_SUITE_P(Beside, BudgetOfAllStepsTest,
                         testing::Values(BesideCaptures::nothing, BesideCaptures::gradients,
                                         BesideCaptures::large_inputs),
                         name_of_beside);

class BudgetErrorTest : public CallTest {
 protected:
  [[nodiscard]] Options within(std::size_t bytes) const {
    return Options(device_).min_bytes(1024).graph("blocks.*").device_budget(bytes);
  }
};

TEST_F(BudgetErrorTest, BelowTheWeightsOrAboveTheDeviceIsRefused) {
  EXPECT_THROWS(UsageError, "the model's weights and buffers alone take", (OffloadEngine(model_, within(1000))));
  EXPECT_THROWS(UsageError, "but the device has", (OffloadEngine(model_, within(std::size_t{1} << 50))));
}

TEST_F(BudgetErrorTest, WhatThePlanChoosesIsRefusedBesideIt) {
  const std::size_t enough = std::size_t{64} << 20;
  EXPECT_THROWS(UsageError, "without graph", (OffloadEngine(model_, Options(device_).device_budget(enough))));
  for (const Options& options :
       {within(enough).lag(0), within(enough).lookahead(0), within(enough).groups_in_flight(0),
        within(enough).offload_at_most("all", 1), within(enough).offload_fraction("all", 0.5)}) {
    EXPECT_THROWS(UsageError, "device_budget is set together with", (OffloadEngine(model_, options)));
  }
}

TEST_F(BudgetErrorTest, RanksThatCaptureTogetherAndDelayedGradientsAreRefused) {
  for (const GraphOptions& graph : {GraphOptions().agree_to_capture([](bool mine) { return mine; }),
                                    GraphOptions().gradients("**", GradientPolicy::delayed)}) {
    EXPECT_THROWS(UsageError, "agree_to_capture or GradientPolicy::delayed",
                  (OffloadEngine(model_, within(std::size_t{64} << 20).graph_options(graph))));
  }
}

TEST_F(BudgetErrorTest, OffloadThatIsSwitchedOffNeedsNoPlan) {
  OffloadEngine engine(model_, within(std::size_t{64} << 20));
  expect_plain(engine, 0, 2);
  engine.set_activation_offloading("all", false);
  expect_plain(engine, 2, 8);
  EXPECT_EQ(engine.report().offloaded_bytes, 0);
  EXPECT_EQ(engine.report().forecast_peak_bytes, 0);
}

TEST_F(BudgetErrorTest, AStepOfWhichNothingCanBeOffloadedIsRefusedIfItIsLarger) {
  std::size_t weights = 0;
  for (const auto& tensors : {model_.parameters(), model_.buffers()}) {
    for (const at::Tensor& tensor : tensors) {
      weights += tensor.nbytes();
    }
  }
  const std::size_t all_small = std::size_t{1} << 30;
  OffloadEngine engine(model_, within(weights + 1).min_bytes(all_small));
  const auto note = [&] { return engine.report().notes.empty() ? std::string() : engine.report().notes.back(); };
  expect_plain(engine, 0, 3);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "there is no plan yet", note());
  clear_gradients(model_);
  EXPECT_THROWS(UsageError, "nothing that its graphs save can be offloaded", (void)engine.step());
  expect_plain(engine, 3, 6);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "no plan meets it", note());
  OffloadEngine roomy(model_, within(std::size_t{64} << 20).min_bytes(all_small));
  expect_plain(roomy, 6, 12);
}

TEST_F(BudgetErrorTest, OfSeveralShapesTheLargestStepIsPlanned) {
  BlockModel::Shape shape = eight_layers();
  shape.batch = 4;
  const auto train = [&](const Options& options) {
    BlockModel model(shape);
    BlockModel plain(shape);
    model.to(device_);
    plain.to(device_);
    OffloadEngine engine(model, options);
    for (std::int64_t s = 0; s < 13; ++s) {  // the report is of a large one
      expect_same_step(model, &engine, plain, s, [&](BlockModel& of) {
        const Batch batch = batch_of(shape, s, device_);
        const std::int64_t rows = shape.batch - s % 2;
        of.loss(batch.tokens.narrow(0, 0, rows), batch.targets.narrow(0, 0, rows)).backward();
      });
    }
    return engine.report();
  };
  const Options graphs = Options(device_).min_bytes(1024).graph("blocks.*");
  const std::int64_t most = train(graphs).step_peak_bytes;
  const std::int64_t least = train(Options(graphs).offload("all").lag(0)).step_peak_bytes;
  ASSERT_LT(least, most);
  const std::int64_t budget = least + (most - least) / 10;
  const Report report = train(within(static_cast<std::size_t>(budget)));
  EXPECT_GT(report.offloaded_bytes, 0);
  EXPECT_LE(report.step_peak_bytes, budget);
  EXPECT_LE(report.forecast_peak_bytes, budget);
  EXPECT_EQ(report.forecast_step_peak_bytes, report.forecast_peak_bytes);
}

TEST_F(BudgetErrorTest, AnErrorOfProgressLeavesNothingOfThePlan) {
  bool fails = true;
  OffloadEngine engine(model_, within(std::size_t{64} << 20).progress([&](const Progress& progress) {
    if (progress.phase == ProgressPhase::plan && std::exchange(fails, false)) {
      throw std::runtime_error("no more");
    }
  }));
  expect_plain(engine, 0, 3);
  EXPECT_THROWS(std::runtime_error, "no more", (void)engine.step());
  expect_plain(engine, 3, 4);
  EXPECT_GT(engine.report().offloaded_bytes, 0) << "all, as before the plan";
  EXPECT_EQ(engine.report().forecast_peak_bytes, 0);
  expect_plain(engine, 4, 8);
  EXPECT_EQ(engine.report().offloaded_bytes, 0) << "64 MiB are enough for all";
  EXPECT_GT(engine.report().forecast_peak_bytes, 0);
}

TEST_F(BudgetErrorTest, CallsWithoutABackwardDoNotKeepThePlanBack) {
  OffloadEngine engine(model_, within(std::size_t{64} << 20));
  for (BlockModel* const model : {&model_, &plain_}) {
    for (auto& item : model->named_parameters()) {  // nothing that needs a gradient reaches the first two blocks
      const bool early = item.key() == "embedding" || item.key() < "blocks.2";
      item.value().set_requires_grad(!early || item.key() == "head");
    }
  }
  expect_plain(engine, 0, 6);
  EXPECT_GT(engine.report().forecast_peak_bytes, 0);
}

TEST_F(BudgetErrorTest, CallablesHaveNoPartInIt) {
  OffloadEngine engine(model_, within(std::size_t{64} << 20));
  const at::Tensor x = at::ones({2, 4}, device_);
  const auto twice = [](const Tensors& inputs) -> Tensors { return {inputs[0] * 2}; };
  EXPECT_THROWS(UsageError, "make callables, buckets and graphed steps with an engine without it",
                (void)make_graphed_callables(engine, {Callable("twice", owning(twice))}, {{x}}));
}

TEST_F(BudgetErrorTest, OneThatNoPlanMeetsIsAnErrorOnceAndAllStaysOffloaded) {
  OffloadEngine probe(plain_, options());
  for (std::int64_t s = 0; s < 3; ++s) {
    expect_same_step(plain_, &probe, model_, s, [&](BlockModel& of) { of.loss_of(s).backward(); });
  }
  const auto weights = probe.report().step_peak_bytes / 2;
  probe.reset();
  OffloadEngine engine(model_, within(static_cast<std::size_t>(weights)));
  expect_plain(engine, 3, 6);
  const std::int64_t offloaded = engine.report().offloaded_bytes;
  clear_gradients(model_);
  EXPECT_THROWS(UsageError, "with all offloaded that can be", (void)engine.step());
  expect_plain(engine, 6, 9);
  EXPECT_EQ(engine.report().offloaded_bytes, offloaded);
  EXPECT_EQ(engine.report().forecast_peak_bytes, 0);
}

TEST_F(BudgetErrorTest, OneThatTheCapturesExceedIsAnErrorOnceAndAllStaysOffloaded) {
  const auto run_step = [&](OffloadEngine& engine, std::int64_t s) {
    expect_same_step(model_, nullptr, plain_, s, [&](BlockModel& of) {
      std::optional<Step> step;
      if (&of == &model_) {
        of.loss_of(s).backward();  // gradients that are there when the step begins
        step.emplace(engine.step());
      }
      clear_gradients(of);
      of.loss_of(s).backward();
    });
  };
  OffloadEngine probe(model_, options().offload("all").lag(0));
  for (std::int64_t s = 0; s < 4; ++s) {
    run_step(probe, s);
  }
  const auto needed = static_cast<std::size_t>(probe.report().step_peak_bytes);
  probe.reset();
  OffloadEngine engine(model_, within(needed));
  for (std::int64_t s = 4; s < 7; ++s) {
    run_step(engine, s);
  }
  const std::int64_t offloaded = engine.report().offloaded_bytes;
  model_.loss_of(7).backward();
  EXPECT_THROWS(UsageError, "unset gradients before OffloadEngine::step", (void)engine.step());
  for (std::int64_t s = 7; s < 10; ++s) {
    run_step(engine, s);
  }
  EXPECT_EQ(engine.report().offloaded_bytes, offloaded);
  EXPECT_EQ(engine.report().forecast_peak_bytes, 0);
}

TEST_F(BudgetErrorTest, TheBytesOfTheErrorAreABudgetThatWorks) {
  /// The least budget that works, by the error for `budget`. 0: there was no error.
  const auto least = [&](std::size_t budget) {
    OffloadEngine engine(model_, within(budget));
    expect_plain(engine, 0, 3);
    try {
      (void)engine.step();
    } catch (const UsageError& error) {
      const std::string text = error.what();
      const std::size_t begin = text.find('(', text.find(" takes "));
      EXPECT_NE(begin, std::string::npos) << text;
      return static_cast<std::size_t>(std::stoull(text.substr(begin + 1)));
    }
    expect_plain(engine, 3, 5);
    return std::size_t{0};
  };
  (void)least(std::size_t{1} << 30);  // what the first steps leave is there from now on
  std::size_t weights = 0;
  for (const at::Tensor& tensor : model_.parameters()) {
    weights += tensor.nbytes();
  }
  const std::size_t needed = least(2 * weights);
  ASSERT_GT(needed, 0U);
  EXPECT_EQ(least(needed - 1), needed);
  EXPECT_EQ(least(needed), 0U);
}

TEST_F(BudgetErrorTest, IsPlannedLaterIfABackwardIsPending) {
  OffloadEngine engine(model_, within(std::size_t{64} << 20));
  expect_plain(engine, 0, 2);
  at::Tensor pending;
  {
    const auto step = engine.step();  // is measured
    pending = model_.loss_of(2);
    pending.backward(/*gradient=*/{}, /*retain_graph=*/false);
    pending = model_.loss_of(3);
  }
  {
    const auto step = engine.step();
    EXPECT_EQ(engine.report().forecast_peak_bytes, 0);
    pending.backward();
  }
  clear_gradients(model_);
  clear_gradients(plain_);
  expect_plain(engine, 4, 7);
  EXPECT_GT(engine.report().forecast_peak_bytes, 0);
}

TEST_F(BudgetErrorTest, ResetPlansAnew) {
  std::size_t planned = 0;
  OffloadEngine engine(model_, within(std::size_t{64} << 20).progress([&](const Progress& progress) {
    planned += progress.phase == ProgressPhase::plan ? 1 : 0;
    EXPECT_EQ(progress.phase == ProgressPhase::plan, progress.name.find("a step will take") == 0);
  }));
  expect_plain(engine, 0, 6);
  EXPECT_EQ(planned, 1);
  engine.reset();
  EXPECT_EQ(engine.report().forecast_peak_bytes, 0);
  expect_plain(engine, 6, 12);
  EXPECT_EQ(planned, 2);
  EXPECT_GT(engine.report().forecast_peak_bytes, 0);
}

}  // namespace
}  // namespace sidestream::testing_model
