// The step before there is a plan: what leaves in it, and what it tells.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include "call_fixture.h"
#include "expect_throws.h"
#include "graphs/engine/engine_access.h"
#include "models/scopes.h"
#include "models/trapped_model.h"
#include "models/wrapping.h"
#include "runtime/forwarding_runtime.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/scope.h"
#include "warnings.h"

namespace sidestream::testing_model {
namespace {

/// Report::sizing_peak_bytes of a step that offloads, and the peak of the same step without offload.
void expect_close_bound(std::int64_t bound, std::int64_t peak) {
  EXPECT_LE(bound, peak);
  EXPECT_GE(20 * bound, 19 * peak);
}

class FirstStepTest : public CallTest, public testing::WithParamInterface<Wrapping> {
 protected:
  [[nodiscard]] Options options() const { return GetParam().options(device_, 1024); }

  /// The report of one step with `options`.
  [[nodiscard]] Report first_step(const Options& options) const {
    BlockModel model(BlockModel::Shape{});
    model.to(device_);
    OffloadEngine engine(model, options);
    in_step(&engine, [&] { model.loss_of(0).backward(); });
    return engine.report();
  }
};

TEST_P(FirstStepTest, GroupsLeaveAndComeBackWithPlainGradients) {
  OffloadEngine engine(model_, options());
  for (std::int64_t s = 0; s < 3; ++s) {
    expect_plain(engine, s, s + 1);
    EXPECT_GT(engine.report().offloaded_bytes, 0) << "step " << s;
    EXPECT_GT(engine.report().reloaded_bytes, 0) << "step " << s;
  }
}

TEST_P(FirstStepTest, TheReportStillTellsThePeakWithoutOffload) {
  const Report without = first_step(options().host_cap(0));
  const Report with = first_step(options());
  EXPECT_EQ(without.offloaded_bytes, 0);
  EXPECT_EQ(without.sizing_peak_bytes, without.first_step_peak_bytes);
  expect_close_bound(with.sizing_peak_bytes, without.sizing_peak_bytes);
  EXPECT_LT(with.first_step_peak_bytes, without.first_step_peak_bytes);
  EXPECT_EQ(with.step_peak_bytes, with.first_step_peak_bytes);
  EXPECT_EQ(with.unseen_bytes, without.unseen_bytes);
  EXPECT_EQ(with.saved_bytes, without.saved_bytes);
}

/// The optimizer makes its state after the peak of the first step.
TEST_P(FirstStepTest, ThePeakWithoutOffloadIncludesTheOptimizersState) {
  const auto after_steps = [&](const Options& options) {
    BlockModel model(BlockModel::Shape{});
    model.to(device_);
    OffloadEngine engine(model, options);
    torch::optim::AdamW optimizer(model.parameters());
    for (std::int64_t s = 0; s < 4; ++s) {
      in_step(&engine, [&] {
        optimizer.zero_grad();  // those of the step before are there when the step begins
        model.loss_of(s).backward();
      });
      optimizer.step();
    }
    return engine.report();
  };
  const Report without = after_steps(options().host_cap(0));
  EXPECT_GT(without.step_peak_bytes, without.first_step_peak_bytes);
  expect_close_bound(after_steps(options()).sizing_peak_bytes, without.step_peak_bytes);
}

TEST_P(FirstStepTest, AfterItNoMoreIsPinnedThanThePlanNeeds) {
  OffloadEngine engine(model_, options());
  expect_plain(engine, 0, 1);
  const std::int64_t sized = engine.report().pinned_bytes;
  expect_plain(engine, 1, 2);
  const Report report = engine.report();
  EXPECT_EQ(report.pinned_bytes, report.offloaded_bytes);
  EXPECT_EQ(report.pinned_requested_bytes, report.offloaded_bytes);
  EXPECT_LT(report.pinned_bytes, sized) << "the groups that backward needs immediately left in the first step only";
  EXPECT_EQ(report.pinned_allocations_after_planning, 0);
}

TEST_P(FirstStepTest, ACapThatIsTooSmallKeepsTheRestAndSaysSo) {
  const Report all = first_step(options());
  const Options capped = options().host_cap(static_cast<std::size_t>(all.offloaded_bytes / 3));
  expect_close_bound(first_step(capped).sizing_peak_bytes, first_step(options().host_cap(0)).sizing_peak_bytes);
  OffloadEngine engine(model_, capped);
  for (std::int64_t s = 0; s < 3; ++s) {
    expect_plain(engine, s, s + 1);
    const Report report = engine.report();
    EXPECT_GT(report.offloaded_bytes, 0) << "step " << s;
    EXPECT_LE(report.pinned_bytes, report.host_cap) << "step " << s;
    EXPECT_EQ(report.refused_bytes, s == 0 ? all.offloaded_bytes - report.offloaded_bytes : 0) << "step " << s;
    EXPECT_EQ(report.notes.empty(), s == 0) << "the plan names the groups that stay";
  }
}

TEST_P(FirstStepTest, AfterAResetItLeavesAgain) {
  OffloadEngine engine(model_, options());
  expect_plain(engine, 0, 1);
  const Report first = engine.report();
  expect_plain(engine, 1, 3);
  engine.reset();
  expect_plain(engine, 0, 1);
  EXPECT_EQ(engine.report().offloaded_bytes, first.offloaded_bytes);
  EXPECT_EQ(engine.report().refused_bytes, 0);
  EXPECT_EQ(engine.report().pinned_bytes, first.pinned_bytes);
  EXPECT_EQ(engine.report().pinned_allocations_after_planning, 0);
}

// Backward uses the last groups of the first step while their copies trail. What they were offloaded from is free after that.
TEST(FirstStepBackwardTest, HoldsNoMoreThanThatOfLaterSteps) {
  const c10::Device device = find_device("sim");
  torch::nn::Module model;
  OffloadEngine engine(model, Options(device).offload("**").min_bytes(1024));
  std::vector<std::int64_t> peaks;  // of live bytes, as the groups' backwards begin
  for (std::int64_t s = 0; s < 3; ++s) {
    std::int64_t peak = 0;
    Step step = engine.step();
    at::Tensor h = at::ones({64, 64}, device).requires_grad_(true);
    for (int group = 0; group < 8; ++group) {
      const OffloadScope scope("group");
      h = h.mul(0.5).exp().tanh();
      h.register_hook([&peak, device](const at::Tensor& gradient) {
        peak = std::max(peak, memory_use(device).live);
        return gradient;
      });
    }
    std::exchange(h, {}).sum().backward();
    step.finish();
    peaks.push_back(peak);
    EXPECT_GT(engine.report().offloaded_bytes, 0);
  }
  const std::int64_t group = 2 * 64 * 64 * 4;
  EXPECT_LE(peaks[0], peaks[2] + group) << "one group is reloaded ahead, and one was just used";
}

/// Refuses to pin from some call on.
class UnpinnedRuntime final : public ForwardingRuntime {
 public:
  UnpinnedRuntime(std::shared_ptr<Runtime> inner, int served) : ForwardingRuntime(std::move(inner)), served_(served) {}
  PinnedMemory allocate_pinned(std::size_t bytes) override {
    if (served_-- <= 0) {
      throw DeviceError("pinned host memory is used up");
    }
    return inner().allocate_pinned(bytes);
  }

 private:
  int served_;
};

TEST_P(FirstStepTest, PinnedMemoryThatIsRefusedHalfWayKeepsTheRest) {
  const Report all = first_step(options());
  for (const int served : {0, 1, 3}) {
    OffloadEngine engine(
        EngineAccess::engine(model_, options(), std::make_shared<UnpinnedRuntime>(make_runtime(device_), served)));
    for (std::int64_t s = 0; s < 3; ++s) {
      expect_plain(engine, s, s + 1);
      const Report report = engine.report();
      if (s == 0) {
        EXPECT_EQ(report.offloaded_bytes > 0, served > 0);
        EXPECT_EQ(report.offloaded_bytes + report.refused_bytes, all.offloaded_bytes) << served;
      } else {
        EXPECT_FALSE(report.notes.empty()) << "the plan names the groups that stay";
      }
    }
  }
}

TEST_P(FirstStepTest, AForwardThatThrowsLeavesNothingPinnedInUse) {
  OffloadEngine engine(model_, options());
  for (int i = 0; i < 3; ++i) {
    EXPECT_THROWS(ModelBroke, "the model broke", {
      const auto step = engine.step();
      const at::Tensor loss = model_.loss_of(0);
      if (loss.defined()) {
        throw ModelBroke(0);
      }
    });
    EXPECT_EQ(EngineAccess::state(engine).arena().stats().live_leases, 0U);
    EXPECT_EQ(engine.report().steps, 0);
  }
  const std::int64_t pinned = engine.report().pinned_bytes;
  expect_plain(engine, 0, 1);
  EXPECT_EQ(engine.report().pinned_bytes, pinned) << "pinned once";
}

TEST_P(FirstStepTest, ForwardsMayWaitForTheirBackwards) {
  for (const bool reversed : {false, true}) {
    OffloadEngine engine(model_, options());
    for (std::int64_t s = 0; s < 3; ++s) {
      expect_plain(engine, s, [&](BlockModel& model, std::int64_t /*step*/) {
        std::vector<at::Tensor> losses;
        for (std::int64_t m = 0; m < 3; ++m) {
          losses.push_back(model.loss_of(10 * s + m));
        }
        if (reversed) {
          std::reverse(losses.begin(), losses.end());
        }
        for (at::Tensor& loss : losses) {
          loss.backward();
          loss = at::Tensor();
        }
      });
      EXPECT_GT(engine.report().offloaded_bytes, 0);
    }
  }
}

TEST_P(FirstStepTest, AnEngineThatGoesInItLeavesNothing) {
  const auto runtime = make_runtime(device_);
  const std::int64_t live = runtime->live_handles();
  {
    auto engine = std::make_unique<OffloadEngine>(EngineAccess::engine(model_, options(), runtime));
    auto step = std::make_unique<Step>(engine->step());
    model_.loss_of(0).backward();
    std::thread([&] {
      const ExpectedWarnings warnings;
      step.reset();  // not on its own thread: it never ends
      engine.reset();
    }).join();
  }
  EXPECT_EQ(runtime->live_handles(), live);
}

INSTANTIATE_TEST_SUITE_P(Wrapped, FirstStepTest,
                         testing::Values(Wrapping{"eager", "", "blocks.*.core_attn,blocks.*.proj,blocks.*.fc1"},
                                         Wrapping{"whole_blocks", "", "blocks.**"},
                                         Wrapping{"graphs", "blocks.*", "blocks.*.*", 1},
                                         Wrapping{"mixed", "blocks.0,blocks.1", "**.core_attn,**.proj,**.fc1", 1}),
                         [](const testing::TestParamInfo<Wrapping>& info) { return info.param.name; });

/// One step over two scopes and what stands between them.
class FirstStepOfScopes : public testing::Test {
 protected:
  static constexpr std::int64_t kBytes = 64 * 64 * 4;

  using Loss = std::function<at::Tensor(const at::Tensor& x)>;

  [[nodiscard]] at::Tensor data() const {
    auto generator = at::detail::createCPUGenerator(41);
    return at::randn({64, 64}, generator).to(device_);
  }
  /// The report of one step; its gradient is compared with plain training's.
  Report first_step(const std::string& offload, const Loss& loss) {
    const at::Tensor plain = data().requires_grad_(true);
    loss(plain).backward();
    OffloadEngine engine(model_, Options(device_).min_bytes(1024).groups_in_flight(groups_in_flight_).offload(offload));
    const at::Tensor x = data().requires_grad_(true);
    {
      const auto step = engine.step();
      loss(x).backward();
    }
    EXPECT_TRUE(at::equal(x.grad().cpu(), plain.grad().cpu())) << offload;
    return engine.report();
  }
  /// Both give the same baseline.
  void expect_peak_without_offload(const Loss& loss, std::int64_t offloaded_bytes) {
    for (groups_in_flight_ = 0; groups_in_flight_ < 3; ++groups_in_flight_) {
      const Report without = first_step("", loss);
      const Report with = first_step("first,second", loss);
      EXPECT_EQ(with.offloaded_bytes, offloaded_bytes) << groups_in_flight_;
      EXPECT_EQ(with.sizing_peak_bytes, without.sizing_peak_bytes) << groups_in_flight_;
    }
  }

  c10::Device device_ = find_device("sim");
  torch::nn::Module model_;
  std::int64_t groups_in_flight_ = 0;
};

TEST_F(FirstStepOfScopes, AStorageThatAGroupThatStaysSavesAgainComesBack) {
  const Loss loss = [](const at::Tensor& x) {
    at::Tensor h;
    {
      const OffloadScope scope("first");
      h = x.exp().tanh();
    }
    {
      const OffloadScope scope("kept");
      h = h.square() * h;
    }
    return h.sum();
  };
  const Report report = first_step("first", loss);
  EXPECT_EQ(report.offloaded_bytes, 2 * kBytes);
  EXPECT_EQ(report.reloaded_bytes, 2 * kBytes);
}

TEST_F(FirstStepOfScopes, AStorageThatIsWrittenAndSavedAgainIsOffloadedTwice) {
  const Loss loss = [](const at::Tensor& x) {
    at::Tensor h;
    {
      const OffloadScope scope("first");
      h = x * 2;
      h = h * h.detach();
    }
    {
      const at::NoGradGuard no_grad;
      h.mul_(0.5);  // nobody has saved it
    }
    {
      const OffloadScope scope("second");
      h = h.tanh();
    }
    return h.sum();
  };
  (void)first_step("first,second", loss);
}

TEST_F(FirstStepOfScopes, WhatTheProgramHoldsIsAwayOnlyOnceItLetsGo) {
  expect_peak_without_offload(
      [](const at::Tensor& x) {
        at::Tensor early;
        at::Tensor h;
        {
          const OffloadScope scope("first");
          early = x.exp();
          h = early.tanh();
        }
        {
          const OffloadScope scope("second");
          h = h.sigmoid();
        }
        at::Tensor loss = (h * early).sum();
        early = at::Tensor();
        h = at::Tensor();
        return loss + x.square().exp().mean();
      },
      3 * kBytes);
}

TEST_F(FirstStepOfScopes, WhatTheProgramHoldsThroughBackwardIsCountedOnce) {
  at::Tensor held;
  expect_peak_without_offload(
      [&](const at::Tensor& x) {
        held = at::Tensor();
        at::Tensor h;
        {
          const OffloadScope scope("first");
          held = x.exp();
          h = held.tanh();
        }
        const OffloadScope scope("second");
        return h.sigmoid().mul(3).exp().sum();
      },
      4 * kBytes);
}

TEST_F(FirstStepOfScopes, ThePeakMayLieInBackward) {
  expect_peak_without_offload(
      [](const at::Tensor& x) {
        at::Tensor h;
        {
          const OffloadScope scope("first");
          h = x.exp();
        }
        {
          const OffloadScope scope("second");
          h = h.repeat({4, 1}).tanh();
        }
        return h.repeat({4, 1}).sum();
      },
      5 * kBytes);
}

}  // namespace
}  // namespace sidestream::testing_model
