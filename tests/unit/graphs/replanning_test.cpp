// Steps that are not as the sizing pass saw them: what is to leave the device leaves all the same, and the report tells the rest.
#include <numeric>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/ScopeExit.h>
#include <gtest/gtest.h>

#include "models/body_model.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/scope.h"
#include "warnings.h"

namespace sidestream::testing_model {
namespace {

/// Its first operator saves a view of the input, as Linear does of a 3-D input; then four storages of three sizes.
at::Tensor mlp(BodyBlock& block, const at::Tensor& x) {
  const OffloadScope scope("mlp");
  const at::Tensor rows = at::matmul(x.view({-1, x.size(-1)}), block.weight);
  const at::Tensor wide = at::cat({rows, rows}, 1).tanh();
  const at::Tensor both = wide.sigmoid().narrow(1, 0, x.size(-1));
  return x + both.exp().view(x.sizes()) * 0.1;
}

std::int64_t planned_bytes(const Report& report) {
  return std::accumulate(report.groups.begin(), report.groups.end(), std::int64_t{0},
                         [](std::int64_t sum, const GroupReport& group) { return sum + group.offloaded_bytes; });
}

/// In the latest step all that the plan offloads was offloaded and reloaded.
void expect_all_left(const OffloadEngine& engine) {
  const Report report = engine.report();
  EXPECT_GT(report.offloaded_bytes, 0);
  EXPECT_EQ(report.offloaded_bytes, planned_bytes(report));
  EXPECT_EQ(report.reloaded_bytes, report.offloaded_bytes);
  EXPECT_EQ(report.refused_bytes, 0);
  EXPECT_EQ(report.unplanned_bytes, 0);
  EXPECT_EQ(report.pinned_allocations_after_planning, 0);
}

class ReplanningTest : public testing::Test {
 protected:
  [[nodiscard]] Options graphed() const { return eager().graph("blocks.*"); }
  [[nodiscard]] Options eager() const {
    return Options(device_).offload("blocks.*.*").min_bytes(64).groups_in_flight(0);
  }

  c10::Device device_ = find_device("sim");
};

TEST_F(ReplanningTest, AViewOfTheInputThatIsSavedFirstShiftsNothing) {
  BodyTwins twins(device_, {mlp, mlp, mlp, mlp});
  OffloadEngine engine(twins.mine, graphed());
  twins.expect_plain(engine, 0, 4);
  expect_all_left(engine);
  EXPECT_EQ(engine.report().pinned_requested_bytes, engine.report().offloaded_bytes) << "nothing is pinned in vain";
}

TEST_F(ReplanningTest, AHeadThatSavesAGraphsOutputShiftsNothing) {
  class Headed : public BodyModel {
   public:
    using BodyModel::BodyModel;
    at::Tensor loss(std::int64_t s) {
      const at::Tensor h = forward(data(s, 8, 2));
      const OffloadScope scope("head");
      at::Tensor y;
      for (auto& block : *blocks) {  // the graph's output again, saved beside tensors of the head's own
        y = call(block->as<BodyBlock>(), y.defined() ? y : h);
      }
      return (y.sin() * at::cat({y, y}, -1).tanh().narrow(-1, 0, 16).exp()).sum();
    }
  };
  Headed mine(device_, {mlp, mlp});
  Headed plain(device_, {mlp, mlp});
  OffloadEngine engine(mine, graphed().offload("head"));
  for (std::int64_t s = 0; s < 4; ++s) {
    expect_same_step(mine, &engine, plain, s, [&](auto& model) { model.loss(s).backward(); });
  }
  expect_all_left(engine);
}

class ReplanningOfBothTest : public ReplanningTest, public testing::WithParamInterface<bool> {
 protected:
  [[nodiscard]] Options options() const { return GetParam() ? graphed() : eager(); }
};

TEST_P(ReplanningOfBothTest, AFirstStepUnderNoGrad) {
  BodyTwins twins(device_, {mlp, mlp, mlp, mlp});
  OffloadEngine engine(twins.mine, options());
  {
    const at::NoGradGuard no_grad;
    const auto step = engine.step();
    (void)twins.mine.forward(twins.mine.data(0, 8, 2));
  }
  twins.expect_plain(engine, 0, 4);
  expect_all_left(engine);
}

TEST_P(ReplanningOfBothTest, AnotherBatchSize) {
  BodyTwins twins(device_, {mlp, mlp, mlp, mlp});
  OffloadEngine engine(twins.mine, options());
  twins.expect_plain(engine, 0, 3, 8, 2);
  const std::int64_t before = engine.report().offloaded_bytes;
  twins.expect_plain(engine, 3, 6, 8, 6);
  EXPECT_EQ(engine.report().offloaded_bytes, 3 * before);
  EXPECT_EQ(engine.report().refused_bytes, 0);
  for (std::int64_t s = 6; s < 12; ++s) {
    twins.expect_plain(engine, s, s + 1, 8, s % 2 == 0 ? 2 : 6);
    EXPECT_EQ(engine.report().offloaded_bytes, s % 2 == 0 ? before : 3 * before) << "what fits leaves at once";
    EXPECT_EQ(engine.report().refused_bytes, 0);
  }
}

TEST_P(ReplanningOfBothTest, AddedMicrobatches) {
  BodyTwins twins(device_, {mlp, mlp, mlp, mlp});
  OffloadEngine engine(twins.mine, options());
  std::vector<std::int64_t> bytes;
  for (const std::int64_t microbatches : {1, 1, 1, 3, 3, 3, 3}) {
    const auto s = static_cast<std::int64_t>(bytes.size());
    expect_same_step(twins.mine, &engine, twins.plain, s, [&](BodyModel& model) {
      at::Tensor loss;  // of all: so all are in flight
      for (std::int64_t m = 0; m < microbatches; ++m) {
        const at::Tensor part = model.forward(model.data(10 * s + m, 8, 2)).sum();
        loss = loss.defined() ? loss + part : part;
      }
      loss.backward();
    });
    bytes.push_back(engine.report().offloaded_bytes);
  }
  EXPECT_GE(bytes[6], 3 * bytes[2]);
  EXPECT_EQ(engine.report().refused_bytes, 0);
}

TEST_F(ReplanningTest, SizesThatDifferFromStepToStepSoonFindRoom) {
  BodyTwins twins(device_, {mlp, mlp, mlp, mlp});
  std::int64_t pinnings = 0;
  OffloadEngine engine(twins.mine, eager().progress([&](const Progress& progress) {
    pinnings += progress.phase == ProgressPhase::pin ? 1 : 0;
  }));
  constexpr std::int64_t kRows = 16;
  constexpr double kSmall = 1e-3;
  std::int64_t s = 0;
  const auto step_of = [&](std::int64_t rows) {
    expect_same_step(twins.mine, &engine, twins.plain, s, [&](BodyModel& model) {
      const at::Tensor first = model.forward(model.data(2 * s, 8, rows)).sum();
      const at::Tensor loss = first + model.forward(model.data(2 * s + 1, 8, kRows - rows)).sum();
      (loss * kSmall).backward();  // or the weights of so many steps would be infinite
    });
    s += 1;
  };
  for (const std::int64_t rows : {8, 3, 11, 6, 1, 14, 8, 2, 15, 5}) {
    step_of(rows);
  }
  const std::int64_t learned = pinnings;
  EXPECT_GT(learned, 2);
  for (const std::int64_t rows : {12, 4, 15, 7, 1, 9, 13, 2}) {
    step_of(rows);
    EXPECT_EQ(engine.report().refused_bytes, 0) << rows << " rows of " << kRows;
  }
  EXPECT_EQ(pinnings, learned);
  EXPECT_LE(engine.report().pinned_bytes, 2 * engine.report().offloaded_bytes);
  for (std::int64_t i = 0; i < 40; ++i) {  // a plan that lasts, and then a larger step: what it needs and no more
    step_of(8);
  }
  const at::Tensor large = twins.mine.data(0, 8, 4 * kRows);
  for (int i = 0; i < 2; ++i) {
    (void)train_step(twins.mine, &engine, [&] { (twins.mine.forward(large).sum() * kSmall).backward(); });
  }
  EXPECT_EQ(engine.report().refused_bytes, 0);
  EXPECT_LT(engine.report().pinned_bytes, 5 * engine.report().offloaded_bytes / 4);
}

INSTANTIATE_TEST_SUITE_P(EagerAndGraphed, ReplanningOfBothTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "graphed" : "eager"; });

TEST_F(ReplanningTest, ALossKeptAliveTakesNoRoomFromLaterSteps) {
  BodyTwins twins(device_, {mlp, mlp, mlp, mlp});
  OffloadEngine engine(twins.mine, eager());
  twins.expect_plain(engine, 0, 3);
  const std::int64_t all = engine.report().offloaded_bytes;
  at::Tensor kept;
  {
    const auto step = engine.step();
    kept = twins.mine.forward(twins.mine.data(50, 8, 2)).sum();  // its backward never comes
  }
  twins.expect_plain(engine, 3, 4);
  EXPECT_EQ(engine.report().offloaded_bytes + engine.report().refused_bytes, all) << "the report tells what stayed";
  twins.expect_plain(engine, 4, 6);
  EXPECT_EQ(engine.report().offloaded_bytes, all);
  EXPECT_EQ(engine.report().refused_bytes, 0);
}

TEST_F(ReplanningTest, SlicesOfAResidentDataSetStayAndTheRestLeaves) {
  class Resident : public BodyModel {
   public:
    explicit Resident(c10::Device device) : BodyModel(device, {mlp, mlp, mlp}), set(data(0, 512, 2)) {}
    at::Tensor loss(std::int64_t s) {
      at::Tensor h;
      {
        const OffloadScope scope("head");
        h = (set.narrow(1, 8 * s, 8) * first.sum()).tanh();  // saves the whole data set's storage
      }
      for (auto& block : *blocks) {
        h = call(block->as<BodyBlock>(), h);
      }
      return h.sum();
    }
    at::Tensor set;
  };
  Resident mine(device_);
  Resident plain(device_);
  OffloadEngine engine(mine, eager().offload("head"));
  for (std::int64_t s = 0; s < 5; ++s) {
    expect_same_step(mine, &engine, plain, s, [&](auto& model) { model.loss(s).backward(); });
  }
  expect_all_left(engine);
  EXPECT_LT(engine.report().pinned_bytes, static_cast<std::int64_t>(mine.set.nbytes()))
      << "the data set was not pinned for";
}

/// One block, called as often as it is told.
class Shared : public BodyModel {
 public:
  explicit Shared(c10::Device device) : BodyModel(device, {mlp}) {}
  at::Tensor loss(std::int64_t s, std::int64_t times) {
    at::Tensor h = at::matmul(data(s, 8, 2), first);
    for (std::int64_t i = 0; i < times; ++i) {
      h = call(blocks[0]->as<BodyBlock>(), h);
    }
    return h.sum();
  }
};

TEST_P(ReplanningOfBothTest, AModuleCalledManyTimesOffloadsEachTime) {
  Shared mine(device_);
  Shared plain(device_);
  OffloadEngine engine(mine, options());
  std::int64_t s = 0;
  for (const std::int64_t times : {6, 6, 6, 4, 4, 6, 7, 7, 3, 7}) {
    expect_same_step(mine, &engine, plain, s, [&](auto& model) { model.loss(s, times).backward(); });
    ++s;
  }
  EXPECT_EQ(engine.report().refused_bytes, 0);
  EXPECT_EQ(engine.report().offloaded_bytes, engine.report().reloaded_bytes);
  const std::int64_t each = 3 * 2 * 8 * 16 * 4;  // at least: one storage of each size
  EXPECT_GE(engine.report().offloaded_bytes, 4 * each) << "of seven times, the last two stay for the backward";
}

TEST_F(ReplanningTest, TheBoundOfCapturesHoldsInTheSizingStepToo) {
  Shared mine(device_);
  Shared plain(device_);
  OffloadEngine engine(mine, graphed().call_options(CallOptions().max_captures(3)));
  ExpectedWarnings warnings;
  for (std::int64_t s = 0; s < 5; ++s) {
    expect_same_step(mine, &engine, plain, s, [&](auto& model) { model.loss(s, 7).backward(); });
  }
  EXPECT_EQ(engine.report().captures, 6);
  EXPECT_EQ(engine.report().replays, 6) << "the first three of each step";
  EXPECT_EQ(engine.report().refused_bytes, 0) << "what runs eagerly is planned as well";
  EXPECT_EQ(warnings.take().size(), 1U);
}

TEST_F(ReplanningTest, ACallThatRunsEagerlyBesideItsCapturesOffloadsAllTheSame) {
  BodyTwins twins(device_, {mlp, mlp, mlp, mlp});
  OffloadEngine engine(twins.mine, graphed().call_options(CallOptions().on_new_arguments(OnNewArguments::eager)));
  twins.expect_plain(engine, 0, 3);
  EXPECT_EQ(engine.report().eager_calls, 4);
  twins.expect_plain(engine, 3, 6, 12, 3);
  EXPECT_EQ(engine.report().eager_calls, 16) << "the first step's four, and those of the last three";
  EXPECT_GT(engine.report().offloaded_bytes, 0);
  EXPECT_EQ(engine.report().reloaded_bytes, engine.report().offloaded_bytes);
  EXPECT_EQ(engine.report().refused_bytes, 0) << "planned since it was first refused";
  EXPECT_EQ(engine.report().unplanned_bytes, 0);
}

// What is pinned is in the graphs' hands. More is pinned for a call that is captured with the next step, as far as the cap allows.
TEST_F(ReplanningTest, TheFirstRunOfACallWithAnotherShapeOffloadsAllTheSame) {
  BodyTwins twins(device_, {mlp, mlp, mlp, mlp});
  OffloadEngine engine(twins.mine, graphed());
  std::int64_t s = 0;
  for (const std::int64_t rows : {8, 12, 3, 40}) {
    twins.expect_plain(engine, s, s + 1, rows, 3);
    const Report first = engine.report();
    EXPECT_GT(first.offloaded_bytes, 0) << rows;
    EXPECT_EQ(first.refused_bytes, 0) << rows;
    twins.expect_plain(engine, s + 1, s + 3, rows, 3);
    const Report later = engine.report();
    EXPECT_EQ(later.refused_bytes, 0) << rows << ": captured since";
    EXPECT_LE(later.offloaded_bytes, first.offloaded_bytes) << rows;
    EXPECT_EQ(later.pinned_allocations_after_planning, 0);
    s += 3;
  }
}

TEST_F(ReplanningTest, TheFirstRunOfACallWithAnotherShapeKeepsWhatTheCapHasNoRoomFor) {
  BodyTwins twins(device_, {mlp, mlp, mlp, mlp});
  std::int64_t pinned = 0;
  {
    OffloadEngine engine(twins.mine, graphed());
    twins.expect_plain(engine, 0, 3, 8, 3);
    pinned = engine.report().pinned_bytes;
  }
  OffloadEngine engine(twins.mine, graphed().host_cap(static_cast<std::size_t>(2 * pinned)));
  twins.expect_plain(engine, 0, 3, 8, 3);
  twins.expect_plain(engine, 3, 4, 40, 3);
  const Report report = engine.report();
  EXPECT_GT(report.refused_bytes, 0);
  EXPECT_EQ(report.offloaded_bytes + report.refused_bytes, report.unplanned_bytes);
  EXPECT_LE(report.pinned_bytes, report.host_cap);
}

TEST_F(ReplanningTest, CallsInFlightOverTheBoundOffloadAllTheSame) {
  Shared mine(device_);
  Shared plain(device_);
  OffloadEngine engine(mine, graphed().call_options(CallOptions().max_captures(1)));
  ExpectedWarnings warnings;
  std::int64_t s = 0;
  for (const std::int64_t times : {1, 1, 5, 5, 5}) {
    expect_same_step(mine, &engine, plain, s, [&](auto& model) { model.loss(s, times).backward(); });
    ++s;
  }
  EXPECT_EQ(engine.report().replays, 2);
  EXPECT_EQ(engine.report().refused_bytes, 0);
  const std::int64_t each = 3 * 2 * 8 * 16 * 4;  // at least: one storage of each size
  EXPECT_GE(engine.report().offloaded_bytes, 3 * each) << "of four that run eagerly, the last stays for the backward";
  EXPECT_EQ(warnings.take().size(), 1U);
}

TEST_F(ReplanningTest, ResetHoldsNoMorePinnedMemoryThanOnce) {
  for (const bool graphs : {false, true}) {
    BodyTwins twins(device_, {mlp, mlp, mlp, mlp});
    OffloadEngine engine(twins.mine, graphs ? graphed() : eager());
    twins.expect_plain(engine, 0, 3);
    const std::int64_t once = engine.report().pinned_bytes;
    EXPECT_GT(once, 0);
    std::int64_t s = 3;
    for (std::int64_t time = 0; time < 8; ++time) {
      engine.reset();
      EXPECT_EQ(engine.report().pinned_bytes, 0) << "a plan that is gone holds nothing";
      twins.expect_plain(engine, s, s + 3, 8 + time, 2);
      s += 3;
    }
    engine.reset();
    twins.expect_plain(engine, s, s + 3);
    EXPECT_EQ(engine.report().pinned_bytes, once);
  }
}

/// Saves storages of several sizes. A group that stays saves one of them too.
class RecurrentLayers : public torch::nn::Module {
 public:
  explicit RecurrentLayers(c10::Device device)
      : lstm_(register_module(
            "lstm", torch::nn::LSTM(torch::nn::LSTMOptions(8, 16).num_layers(2).batch_first(true).dropout(0.2)))),
        gru_(register_module("gru",
                             torch::nn::GRU(torch::nn::GRUOptions(16, 12).batch_first(true).bidirectional(true)))),
        last_(register_module("last", torch::nn::Linear(24, 4))) {
    to(device);
  }
  /// Its results live until the end of the step, as variables of a trainer do.
  std::vector<at::Tensor> results(const at::Tensor& x) {
    const at::Tensor y = std::get<0>(call(lstm_, x));
    const at::Tensor z = std::get<0>(call(gru_, y));
    return {y, z, call(last_, z).sum()};
  }

 private:
  torch::nn::LSTM lstm_;
  torch::nn::GRU gru_;
  torch::nn::Linear last_;
};

TEST_F(ReplanningTest, LengthsThatComeInTurnsAreAllOffloaded) {
  at::globalContext().setUserEnabledMkldnn(true);  // its LSTM saves one storage that is larger than all others
  const auto as_before = c10::make_scope_exit([] { at::globalContext().setUserEnabledMkldnn(false); });
  torch::manual_seed(1);
  RecurrentLayers model(device_);
  OffloadEngine engine(model, Options(device_).offload("**").min_bytes(1));
  for (std::int64_t s = 0; s < 15; ++s) {
    Step step = engine.step();
    const auto results = model.results(at::ones({3, 5 + s % 3, 8}, device_).requires_grad_(true));
    results.back().backward();
    step.finish();
    EXPECT_TRUE(s < 9 || engine.report().refused_bytes == 0) << engine.report().refused_bytes << " in step " << s;
  }
}

// Such a step may have failed because nothing was offloaded. No plan is made of it.
TEST_F(ReplanningTest, AfterAFailedStepThatFoundNoPinnedMemoryMoreIsPinned) {
  BodyTwins twins(device_, {mlp, mlp, mlp, mlp});
  OffloadEngine engine(twins.mine, eager());
  twins.expect_plain(engine, 0, 3, 8, 2);
  const std::int64_t pinned = engine.report().pinned_bytes;
  const auto fail = [&] {
    const Step step = engine.step();
    (void)twins.mine.forward(twins.mine.data(3, 8, 20));
    throw std::runtime_error("no memory is left");
  };
  EXPECT_THROW(fail(), std::runtime_error);
  EXPECT_EQ(engine.report().pinned_bytes, pinned);
  for (std::int64_t s = 4; s < 7; ++s) {
    twins.expect_plain(engine, s, s + 1, 8, 20);
    EXPECT_EQ(engine.report().refused_bytes, 0) << s;
    EXPECT_GT(engine.report().offloaded_bytes, pinned) << s;
    EXPECT_EQ(engine.report().pinned_allocations_after_planning, 0) << s;
  }
}

TEST_F(ReplanningTest, TheReportTellsWhatStayed) {
  BodyTwins twins(device_, {mlp, mlp, mlp, mlp});
  OffloadEngine engine(twins.mine, eager());
  twins.expect_plain(engine, 0, 3, 8, 2);
  twins.expect_plain(engine, 3, 4, 8, 20);
  const Report report = engine.report();
  EXPECT_GT(report.refused_bytes, 0);
  EXPECT_GE(report.unplanned_bytes, report.refused_bytes);
}

}  // namespace
}  // namespace sidestream::testing_model
