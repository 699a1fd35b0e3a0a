// What makes the host wait is found wherever a step does it, and said with its place (Options::find_syncs): every kind in every context.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include "expect_throws.h"
#include "models/waiting_model.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/scope.h"
#include "warnings.h"

namespace sidestream::testing_model {
namespace {

/// Those that the simulated device tells of.
std::vector<WaitKind> wait_kinds() {
  static std::int64_t grown = 1;
  std::vector<WaitKind> kinds = operator_waits();
  const std::vector<WaitKind> others = {
      {"event", "event synchronisation", "synchronize of an event",
       [](const at::Tensor& t) {
         c10::Event event(t.device().type());
         event.record(c10::impl::getDeviceGuardImpl(t.device().type())->getStream(t.device()));
         event.synchronize();
       }},
      {"stream", "stream synchronisation", "synchronize of a stream",
       [](const at::Tensor& t) {
         c10::impl::getDeviceGuardImpl(t.device().type())->getStream(t.device()).synchronize();
       }},
      {"device", "device synchronisation", "sidestream::synchronize",
       [](const at::Tensor& t) { synchronize(t.device()); }},
      {"guard's device", "device synchronisation", "synchronize of the device",
       [](const at::Tensor& t) { c10::impl::getDeviceGuardImpl(t.device().type())->synchronizeDevice(0); }},
      {"cached memory given back", "device synchronisation", "sidestream::release_cached_memory",
       [](const at::Tensor& t) { release_cached_memory(t.device()); }},
      {"allocation", "device allocation", "aten::empty",
       [](const at::Tensor& t) { (void)at::empty({(grown++ << 23) + (std::int64_t{1} << 25)}, t.options()); }},
  };
  kinds.insert(kinds.end(), others.begin(), others.end());
  return kinds;
}

class FindSyncsTest : public testing::Test {
 protected:
  FindSyncsTest() { model_.to(device_); }

  [[nodiscard]] Options options() const {
    return Options(device_).graph("front,back").offload("front,middle").min_bytes(64).lag(1).find_syncs(true);
  }
  /// Data is made before a step, as a trainer does.
  void step(OffloadEngine& engine, bool eager_too = true) {
    const at::Tensor data = at::rand({8, 8}).to(device_).requires_grad_();
    auto step = engine.step();
    model_.train_on(data, eager_too);
    step.finish();
  }
  void steps(OffloadEngine& engine, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      step(engine);
    }
  }

  c10::Device device_ = find_device("sim");
  WaitingModel model_;
};

TEST_F(FindSyncsTest, TrainingThatNeverWaitsHasNoFindings) {
  OffloadEngine engine(model_, options());
  steps(engine, 12);
  const Report report = engine.report();
  EXPECT_GT(report.replays, 0);
  EXPECT_EQ(report.syncs_found, 0) << report.json();
  EXPECT_TRUE(report.syncs.empty());
}

TEST_F(FindSyncsTest, EveryKindIsFoundInEveryContextWithItsPlaceAndCount) {
  for (const WaitKind& kind : wait_kinds()) {
    for (const ExpectedPlace& place : waiting_places()) {
      SCOPED_TRACE(std::string(kind.label) + ", " + place.label);
      OffloadEngine engine(model_, options());
      steps(engine, 7);
      {
        const PlantedWait planted(place.context, kind.wait);
        steps(engine, 3);
      }
      step(engine);
      const Report report = engine.report();
      std::int64_t count = 0;
      for (const SyncFinding& found : report.syncs) {
        if (found.kind != kind.name) {  // memory that was given back is asked for anew
          EXPECT_EQ(found.kind, "device allocation") << report.json();
          continue;
        }
        count += found.count;
        EXPECT_EQ(found.operation, kind.operation);
        EXPECT_EQ(found.call, place.call);
        EXPECT_EQ(found.scope, place.scope);
        EXPECT_EQ(!found.node.empty(), place.in_backward) << found.node;
        EXPECT_FALSE(found.stack.empty());
        EXPECT_FALSE(found.remedy.empty());
      }
      EXPECT_EQ(count, 3) << report.json();
    }
  }
}

TEST_F(FindSyncsTest, AnotherThreadsWaitIsNoFinding) {
  for (const WaitKind& kind : wait_kinds()) {
    SCOPED_TRACE(kind.label);
    OffloadEngine engine(model_, options());
    steps(engine, 7);
    {
      const PlantedWait planted(WaitContext::other_thread, kind.wait);
      steps(engine, 2);
    }
    for (const SyncFinding& found : engine.report().syncs) {
      EXPECT_EQ(found.kind, "device allocation") << "of the step itself, behind memory that was given back";
      EXPECT_STREQ(kind.label, "cached memory given back");
    }
  }
}

TEST_F(FindSyncsTest, FirstStepsAllocateAndThatIsNoFinding) {
  OffloadEngine engine(model_, options());
  const PlantedWait planted(WaitContext::between, wait_kinds().back().wait);
  steps(engine, 3);
  EXPECT_EQ(engine.report().syncs_found, 0);
  steps(engine, 5);
  EXPECT_GT(engine.report().syncs_found, 0);
}

TEST_F(FindSyncsTest, AStepInWhichSomethingWasCapturedMayAllocateAndSoMayTheNext) {
  OffloadEngine engine(model_, options());
  steps(engine, 7);
  WaitingModel other;
  other.to(device_);
  OffloadEngine inner(other, Options(device_).graph("front,back"));
  const at::Tensor data = at::rand({8, 8}).to(device_).requires_grad_();
  const auto inner_step = [&] {
    auto step = inner.step();
    other.train_on(data, false);
    step.finish();
  };
  inner_step();
  {
    auto step = engine.step();
    inner_step();
    wait_kinds().back().wait(data.detach());
    model_.train_on(data);
    step.finish();
  }
  EXPECT_GT(inner.report().captures, 0);
  const PlantedWait planted(WaitContext::between, wait_kinds().back().wait);
  steps(engine, 3);
  EXPECT_EQ(engine.report().syncs_found, 0) << engine.report().json();
  step(engine);
  EXPECT_GT(engine.report().syncs_found, 0) << "it is steady again";
}

TEST_F(FindSyncsTest, ABackwardIsAttributedToTheCallWhoseEagerRunMadeIt) {
  struct Outer : torch::nn::Module {
    Outer() : member(register_module("member", std::make_shared<WaitingTail>())) {}
    std::shared_ptr<WaitingTail> member;
  } outer;
  outer.to(device_);
  OffloadEngine engine(outer, Options(device_).graph("member").find_syncs(true));
  const PlantedWait planted(WaitContext::backward, wait_kinds().front().wait);
  const at::Tensor data = at::rand({8, 8}).to(device_).requires_grad_();
  {
    auto step = engine.step();
    call(outer.member, data).sum().backward();
    step.finish();
  }
  const Report report = engine.report();
  ASSERT_EQ(report.syncs.size(), 1U) << report.json();
  EXPECT_EQ(report.syncs[0].call, "member");
  EXPECT_EQ(report.syncs[0].scope, "member.tail");
  EXPECT_NE(report.syncs[0].node.find("WaitsInBackward"), std::string::npos) << report.syncs[0].node;
}

TEST_F(FindSyncsTest, TheLibrarysOwnWaitsAreNoFindings) {
  const at::Tensor data = at::rand({8, 8}).to(device_).requires_grad_();
  OffloadEngine engine(model_, options().verify_replays(1000).check_steps(2));
  steps(engine, 5);
  EXPECT_GT(engine.report().verified_forwards, 0);
  EXPECT_GT(engine.report().verified_backwards, 0);
  EXPECT_EQ(engine.report().syncs_found, 0) << engine.report().json();
  engine.reset();
  steps(engine, 2);
  {  // captures inside of a step of an engine around it
    auto step = engine.step();
    WaitingModel other;
    other.to(device_);
    OffloadEngine inner(other, Options(device_).graph("front,back"));
    for (std::int64_t i = 0; i < 3; ++i) {
      auto inner_step = inner.step();
      other.train_on(data, false);
      inner_step.finish();
    }
    step.finish();
  }
  for (const SyncFinding& found : engine.report().syncs) {
    EXPECT_EQ(found.operation, "aten::to") << "the new model's weights go to the device in the step";
  }
}

TEST_F(FindSyncsTest, BetweenStepsAndWithoutTheOptionNothingIsFound) {
  OffloadEngine silent(model_, options().find_syncs(false));
  {
    const PlantedWait planted(WaitContext::between, wait_kinds().front().wait);
    steps(silent, 3);
  }
  EXPECT_EQ(silent.report().syncs_found, 0);
  OffloadEngine engine(model_, options());
  for (std::int64_t i = 0; i < 4; ++i) {
    step(engine);
    for (const WaitKind& kind : wait_kinds()) {
      if (std::string(kind.label) != "cached memory given back") {
        kind.wait(at::ones({8, 8}).to(device_));
      }
    }
  }
  EXPECT_EQ(engine.report().syncs_found, 0) << engine.report().json();
}

TEST_F(FindSyncsTest, TheEnvironmentTurnsItOn) {
  for (const auto& [value, finds] : std::vector<std::pair<const char*, bool>>{{"1", true}, {"0", false}, {"", false}}) {
    setenv("SIDESTREAM_FIND_SYNCS", value, 1);
    OffloadEngine engine(model_, options().find_syncs(false));
    unsetenv("SIDESTREAM_FIND_SYNCS");
    const PlantedWait planted(WaitContext::between, wait_kinds().front().wait);
    step(engine);
    EXPECT_EQ(engine.report().syncs_found, finds ? 1 : 0) << value;
  }
  setenv("SIDESTREAM_FIND_SYNCS", "yes", 1);
  EXPECT_THROWS(UsageError, "SIDESTREAM_FIND_SYNCS is \"yes\"", OffloadEngine(model_, options()));
  unsetenv("SIDESTREAM_FIND_SYNCS");
}

TEST_F(FindSyncsTest, TwoEnginesFindWhatIsInTheirOwnSteps) {
  OffloadEngine first(model_, options());
  WaitingModel other;
  other.to(device_);
  OffloadEngine second(other, options());
  const at::Tensor data = at::rand({8, 8}).to(device_).requires_grad_();
  for (std::int64_t i = 0; i < 3; ++i) {
    step(first);
    auto inner = second.step();
    other.train_on(data, false);
    inner.finish();
  }
  {
    auto outer = first.step();
    const at::Tensor sum = data.detach().sum();
    (void)sum.item<float>();  // the outer's
    {
      auto inner = second.step();
      (void)at::nonzero(data.detach());  // the inner's
      other.train_on(data, false);
      inner.finish();
    }
    (void)sum.item<float>();  // the outer's again
    model_.train_on(data, false);
    outer.finish();
  }
  const Report outer = first.report();
  const Report inner = second.report();
  ASSERT_EQ(inner.syncs_found, 1) << inner.json();
  EXPECT_EQ(inner.syncs[0].operation, "aten::nonzero");
  ASSERT_EQ(outer.syncs_found, 2) << outer.json();
  EXPECT_EQ(outer.syncs[0].operation, "aten::item");
}

TEST_F(FindSyncsTest, EnginesOfTwoThreadsFindTheirOwn) {
  const auto train = [&](std::int64_t items, Report& report) {
    WaitingModel model;
    model.to(device_);
    OffloadEngine engine(model, Options(device_).offload("middle").min_bytes(64).find_syncs(true));
    const at::Tensor data = at::rand({8, 8}).to(device_).requires_grad_();
    for (std::int64_t i = 0; i < 6; ++i) {
      auto step = engine.step();
      model.train_on(data, false);
      for (std::int64_t k = 0; k < items; ++k) {
        (void)data.detach().sum().item<float>();
      }
      step.finish();
    }
    report = engine.report();
  };
  Report two;
  Report five;
  std::thread a([&] { train(2, two); });
  std::thread b([&] { train(5, five); });
  a.join();
  b.join();
  const auto values = [](const Report& report) {
    std::int64_t count = 0;
    for (const SyncFinding& found : report.syncs) {
      count += found.kind == "value read on the host" ? found.count : 0;
    }
    return count;
  };
  EXPECT_EQ(values(two), 12);
  EXPECT_EQ(values(five), 30);
}

TEST_F(FindSyncsTest, AStepThatIsLeftOnAnotherThreadFindsNoMore) {
  OffloadEngine engine(model_, options());
  steps(engine, 2);
  {
    auto left = std::make_unique<Step>(engine.step());
    std::thread([&] {
      const ExpectedWarnings warnings;
      left.reset();
    }).join();
  }
  EXPECT_THROW((void)engine.step(), UsageError);  // what the destructor kept
  step(engine);
  (void)at::ones({4}).to(device_).sum().item<float>();
  EXPECT_EQ(engine.report().syncs_found, 0);
  const PlantedWait planted(WaitContext::between, wait_kinds().front().wait);
  step(engine);
  EXPECT_EQ(engine.report().syncs_found, 1) << engine.report().json();
}

TEST_F(FindSyncsTest, AHundredPlacesAreListedAndAllAreCounted) {
  OffloadEngine engine(model_, options());
  static constexpr std::int64_t kPlaces = 130;
  const PlantedWait planted(WaitContext::between, [](const at::Tensor& t) {
    for (std::int64_t i = 0; i < kPlaces; ++i) {
      const std::string name = "place" + std::to_string(i);
      const OffloadScope scope(name.c_str());
      (void)t.sum().item<float>();
    }
  });
  steps(engine, 2);
  const Report report = engine.report();
  EXPECT_EQ(report.syncs_found, 2 * kPlaces);
  EXPECT_EQ(report.syncs.size(), 100U);
  EXPECT_EQ(report.syncs_unlisted, 2 * kPlaces - 200);
}

}  // namespace
}  // namespace sidestream::testing_model
