// Training where what a group saves lies in storages below Options::min_bytes: they leave as one block where they have as many bytes
// together.
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "expect_throws.h"
#include "graphs/engine/engine_access.h"
#include "graphs/engine/engine_state.h"
#include "models/block_model.h"
#include "models/expert_model.h"
#include "models/plain_twin.h"
#include "models/wrapping.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/scope.h"
#include "sim/device/device.h"
#include "unit/sim/rerun/every_order.h"
#include "warnings.h"

namespace sidestream::testing_model {
namespace {

std::int64_t small_tensors(const Report& report) {
  for (const ExclusionReport& exclusion : report.exclusions) {
    if (exclusion.reason == "small") {
      return exclusion.tensors;
    }
  }
  return 0;
}

/// A mixture of experts and its plain twin.
class ExpertTrainingTest : public testing::Test {
 protected:
  ExpertTrainingTest() {
    mine_.to(device_);
    plain_.to(device_);
  }
  [[nodiscard]] Options options() const { return Options(device_).min_bytes(6000).offload("experts.*").lag(1); }

  /// `in_flight` forwards, then one backward and one forward in turn, then the rest.
  void train(ExpertModel& model, std::int64_t s, std::int64_t microbatches = 1, std::size_t in_flight = 1,
             bool twice = false) const {
    std::deque<at::Tensor> losses;
    const auto backward = [&] {
      if (twice) {
        losses.front().backward({}, /*retain_graph=*/true);
      }
      losses.front().backward();
      losses.pop_front();
    };
    for (std::int64_t i = 0; i < microbatches; ++i) {
      const std::int64_t number = microbatches * s + i;
      losses.push_back(model.loss(expert_tokens(number, 120 + 8 * (number % 5), device_)));
      if (losses.size() == in_flight) {
        backward();
      }
    }
    while (!losses.empty()) {
      backward();
    }
  }
  StepTensors step(ExpertModel& model, OffloadEngine* engine, std::int64_t s) const {
    return train_step(model, engine, [&] { train(model, s); });
  }
  void expect_plain(OffloadEngine& engine, std::int64_t s) {
    expect_same_step(mine_, &engine, plain_, s, [&](ExpertModel& model) { train(model, s); });
  }

  sim::OneThread one_thread_;
  c10::Device device_ = find_device("sim");
  ExpertModel mine_;
  ExpertModel plain_;
};

TEST_F(ExpertTrainingTest, ExpertsWhoseSizesChangeGivePlainGradients) {
  OffloadEngine engine(mine_, options());
  for (std::int64_t s = 0; s < 12; ++s) {
    expect_plain(engine, s);
    const Report report = engine.report();
    EXPECT_GT(report.offloaded_bytes, 40'000) << "step " << s;
    EXPECT_GT(report.reloaded_bytes, 0) << "step " << s;
    EXPECT_EQ(report.pinned_allocations_after_planning, 0);
  }
}

TEST_F(ExpertTrainingTest, WhatABlockOnceTookStaysPinnedForIt) {
  OffloadEngine engine(mine_, options());
  std::int64_t refused = 0;
  for (std::int64_t s = 0; s < 20; ++s) {
    expect_plain(engine, s % 5);
    refused = engine.report().refused_bytes;
  }
  EXPECT_EQ(refused, 0) << "no expert is larger than it ever was";
}

TEST_F(ExpertTrainingTest, MicrobatchesInFlightAndRetainedGraphsGivePlainGradients) {
  for (const bool twice : {false, true}) {
    for (const std::size_t in_flight : {1, 2, 3}) {
      ExpertModel mine;
      ExpertModel plain;
      mine.to(device_);
      plain.to(device_);
      OffloadEngine engine(mine, options());
      for (std::int64_t s = 0; s < 4; ++s) {
        expect_same_step(mine, &engine, plain, s, [&](ExpertModel& model) { train(model, s, 3, in_flight, twice); });
        EXPECT_GT(engine.report().offloaded_bytes, 40'000);
      }
    }
  }
}

TEST_F(ExpertTrainingTest, WithoutPinnedMemoryAllStays) {
  OffloadEngine engine(mine_, options().host_cap(0));
  for (std::int64_t s = 0; s < 3; ++s) {
    expect_plain(engine, s);
    EXPECT_EQ(engine.report().offloaded_bytes, 0);
  }
}

// Also that of a block, in the first step or in one that has a plan.
TEST_F(ExpertTrainingTest, EveryDeviceAllocationThatFailsIsSurvived) {
  constexpr std::int64_t kSteps = 3;
  ExpectedWarnings warnings;
  std::vector<StepTensors> expected;
  for (std::int64_t s = 0; s < kSteps; ++s) {
    expected.push_back(step(plain_, nullptr, s));
  }
  sim::Device& device = sim::Device::get();
  int done_without = 0;
  for (std::int64_t n = 0;; n += 23) {
    ExpertModel mine;
    mine.to(device_);
    OffloadEngine engine(mine, options());
    device.fail_allocation(n);
    bool thrown = false;
    for (std::int64_t s = 0; s < kSteps && !thrown; ++s) {
      try {
        EXPECT_TRUE(same(step(mine, &engine, s), expected[static_cast<std::size_t>(s)])) << n;
      } catch (const DeviceError&) {
        thrown = true;
      }
    }
    const bool failed = device.allocation_failed();
    device.fail_allocation(-1);
    if (!failed) {
      break;
    }
    done_without += thrown ? 0 : 1;
    (void)step(mine, &engine, kSteps);  // only a backward makes autograd let go of one that failed
    EXPECT_EQ(EngineAccess::state(engine).arena().stats().live_leases, 0U) << n;
    (void)step(mine, &engine, kSteps);
    EXPECT_GT(engine.report().offloaded_bytes, 40'000) << n;
  }
  EXPECT_GT(done_without, 0) << "what a block had no memory for stayed";
}

/// Scopes whose storages have known sizes.
class KnownSizesTest : public testing::Test {
 protected:
  /// 64 floats, in `count` rows.
  [[nodiscard]] at::Tensor rows(std::int64_t count) const {
    auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(count));
    return at::randn({count, 64}, generator).to(device_).requires_grad_(true);
  }
  /// Saves as many storages as `h` has bytes: what exp gives, and all that follow.
  static at::Tensor saving(at::Tensor h, int storages) {
    h = h.exp();
    for (int i = 1; i < storages; ++i) {
      h = h.tanh();
    }
    return h;
  }
  /// Steps of `loss` with the engine, each with the gradient that there is without it.
  Report train(const Options& options, const at::Tensor& x, const std::function<at::Tensor(const at::Tensor&)>& loss,
               int steps = 3) {
    const at::Tensor expected = torch::autograd::grad({loss(x)}, {x})[0];
    OffloadEngine engine(model_, options);
    for (int s = 0; s < steps; ++s) {
      const auto step = engine.step();
      const at::Tensor mine = torch::autograd::grad({loss(x)}, {x})[0];
      EXPECT_TRUE(same({{"x", mine}}, {{"x", expected}})) << "step " << s;
    }
    return engine.report();
  }
  [[nodiscard]] Options options(const char* offload = "some,last") const {
    return Options(device_).min_bytes(8192).lag(1).offload(offload);
  }
  /// Backward needs it immediately, so it stays; what was saved before it leaves.
  static at::Tensor last(const at::Tensor& h) {
    const OffloadScope scope("last");
    return saving(h, 2).mean();
  }

  sim::OneThread one_thread_;
  c10::Device device_ = find_device("sim");
  torch::nn::Module model_;
};

TEST_F(KnownSizesTest, SmallStoragesLeaveBesideLargeOnesAndAreCounted) {
  const auto loss = [&](const at::Tensor& x) {
    at::Tensor h = x;
    {
      const OffloadScope scope("some");
      h = saving(x, 2);                                      // 2 of 10,240 bytes
      h = h + saving(x.narrow(0, 0, 9).mul(0.5), 5).mean();  // 5 of 2,304, in 2,560 each
    }
    return last(h);
  };
  const Report report = train(options(), rows(40), loss);
  EXPECT_EQ(report.offloaded_bytes, 2 * 10'240 + 5 * 2'560);
  EXPECT_EQ(report.reloaded_bytes, report.offloaded_bytes);
  EXPECT_EQ(report.pinned_bytes, report.offloaded_bytes);
  EXPECT_EQ(report.pinned_requested_bytes, report.offloaded_bytes);
  EXPECT_EQ(report.unplanned_bytes, 0);
  EXPECT_EQ(small_tensors(report), 0);
  ASSERT_EQ(report.groups.size(), 2U);
  EXPECT_EQ(report.groups[0].name, "some");
  EXPECT_EQ(report.groups[0].offloaded_bytes, 2 * 10'240 + 5 * 2'304);
}

TEST_F(KnownSizesTest, AGroupThatHasTooFewKeepsThem) {
  const auto loss = [&](const at::Tensor& x) {
    at::Tensor h = x;
    {
      const OffloadScope scope("some");
      h = saving(x, 2);
      h = h + saving(x.narrow(0, 0, 9).mul(0.5), 3).mean();
    }
    {
      const OffloadScope scope("some");  // nothing but small ones
      h = h + saving(x.narrow(0, 0, 9).mul(0.3), 3).mean();
    }
    return last(h);
  };
  const Report report = train(options(), rows(40), loss);
  EXPECT_EQ(report.offloaded_bytes, 2 * 10'240);
  EXPECT_EQ(small_tensors(report), 3 * 6);
  ASSERT_EQ(report.groups.size(), 2U) << "one has nothing that could leave";
  EXPECT_EQ(report.groups[0].bytes, 2 * 10'240);
}

TEST_F(KnownSizesTest, AStorageThatAnotherGroupSavesTooStays) {
  const auto loss = [&](const at::Tensor& x) {
    at::Tensor small = x.narrow(0, 0, 9).mul(0.5);
    at::Tensor h = x;
    {
      const OffloadScope scope("some");
      small = saving(small, 6);
    }
    {
      const OffloadScope scope("other");
      h = saving(h + small.sin().mean(), 1);  // saves what the last tanh gave
    }
    return last(h + small.mean());
  };
  const Report report = train(options("some,other,last"), rows(40), loss);
  EXPECT_EQ(report.groups[0].offloaded_bytes, 5 * 2'304);
  EXPECT_EQ(report.groups[0].bytes, 6 * 2'304);
}

TEST_F(KnownSizesTest, AGroupThatTurnsRoundDoesNotGather) {
  const auto loss = [&](const at::Tensor& x) {
    const OffloadScope scope("some");
    return saving(x, 5).mean();
  };
  const Report report = train(options("some"), rows(9), loss);
  EXPECT_EQ(report.offloaded_bytes, 0);
  EXPECT_EQ(report.pinned_bytes, 0);
  ASSERT_EQ(report.groups.size(), 1U);
  EXPECT_EQ(report.groups[0].kept_because, "backward needs it immediately");
}

TEST_F(KnownSizesTest, AWriteInPlaceIsSeenAsInPlainTraining) {
  OffloadEngine engine(model_, options());
  const at::Tensor x = rows(9);
  for (int s = 0; s < 3; ++s) {
    auto step = engine.step();
    at::Tensor written;
    at::Tensor h;
    {
      const OffloadScope scope("some");
      written = x.exp();
      h = saving(written.tanh(), 4);
    }
    h = last(h);
    written.mul_(2);
    EXPECT_THROWS(UsageError, "changed in place", (void)torch::autograd::grad({h}, {x}));
    h = at::Tensor();
  }
}

TEST_F(KnownSizesTest, TheStepBeforeThePlanPeaksAsWithoutOffload) {
  const auto loss = [&](const at::Tensor& x) {
    at::Tensor h = x;
    for (int i = 0; i < 4; ++i) {
      const OffloadScope scope("some");
      h = saving(h, 6);
    }
    return h.mean();
  };
  const Report with = train(options(), rows(30), loss, 1);
  const Report without = train(options().host_cap(0), rows(30), loss, 1);
  EXPECT_EQ(with.offloaded_bytes, 4 * 6 * 7'680);
  EXPECT_EQ(without.offloaded_bytes, 0);
  EXPECT_LE(with.sizing_peak_bytes, without.sizing_peak_bytes);
  EXPECT_GE(with.sizing_peak_bytes, without.sizing_peak_bytes - 7'680) << "more than one tensor is missing";
  EXPECT_LT(with.first_step_peak_bytes, without.first_step_peak_bytes);
  EXPECT_EQ(with.saved_bytes, without.saved_bytes);
  EXPECT_EQ(with.unseen_bytes, without.unseen_bytes);
}

// All that leaves does so in blocks.
TEST_F(KnownSizesTest, AGraphGathersWhatItsGroupsSave) {
  const auto loss = [](const at::Tensor& x) {
    at::Tensor h = x;
    for (const char* name : {"a", "b", "c"}) {
      h = call(
          name,
          [](const at::Tensor& in) {
            const OffloadScope scope("some");
            return saving(in, 5).mul(0.5);
          },
          h);
    }
    return h.mean();
  };
  const Report report = train(options("**.some").graph("a,b,c"), rows(30), loss, 5);
  EXPECT_GT(report.replays, 0);
  EXPECT_EQ(report.offloaded_bytes, 2 * 5 * 7'680);
  EXPECT_EQ(report.pinned_bytes, report.offloaded_bytes);
}

/// Blocks of a transformer: what they save is partly below, partly above the limit.
class MixedSizesTest : public testing::TestWithParam<Wrapping> {
 protected:
  c10::Device device_ = find_device("sim");
  BlockModel::Shape shape_{.layers = 5};
};

TEST_P(MixedSizesTest, TrainingGivesPlainGradients) {
  const auto offloaded = [&](std::size_t min_bytes) {
    const BlockTraining mine{shape_, device_, 5, [&](BlockModel& model) {
                               return std::make_unique<OffloadEngine>(model, GetParam().options(device_, min_bytes));
                             }};
    expect_plain(mine, BlockTraining{shape_, device_, 5});
    EXPECT_EQ(mine.report.pinned_allocations_after_planning, 0);
    EXPECT_EQ(mine.report.refused_bytes, 0);
    return mine.report.offloaded_bytes;
  };
  EXPECT_GT(offloaded(4097), 0);
  EXPECT_GT(offloaded(8192), 0);
}

INSTANTIATE_TEST_SUITE_P(Wrappings, MixedSizesTest, testing::ValuesIn(wrappings()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace sidestream::testing_model
