#include <cstdint>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include "observe/call_stack.h"
#include "observe/sync_finder.h"
#include "observe/sync_kinds.h"
#include "runtime/host_waits.h"
#include "runtime/runtime.h"
#include "sidestream/report.h"

namespace sidestream {
namespace {

constexpr c10::DeviceType kSimType = c10::DeviceType::PrivateUse1;

class SyncFinderTest : public testing::Test {
 protected:
  SyncFinderTest() : runtime_(make_runtime(c10::Device(kSimType, 0))) {
    sim_tensor_ = at::ones({4, 4}).to(runtime_->device());
  }

  [[nodiscard]] static Report found(const SyncFinder& finder) {
    Report report;
    finder.add_to(report);
    return report;
  }
  /// As a backend does.
  static void tell(HostWait kind) { host_waits::tell(kSimType, kind, "a call"); }

  std::shared_ptr<Runtime> runtime_;
  at::Tensor sim_tensor_;
};

TEST_F(SyncFinderTest, OnlyInAStepAndOnlyItsDevice) {
  SyncFinder finder(kSimType, {}, {});
  tell(HostWait::stream);
  {
    const SyncFinder::Step step(finder, false);
    tell(HostWait::stream);
    host_waits::tell(c10::DeviceType::CUDA, HostWait::stream, "a call");
  }
  tell(HostWait::stream);
  const Report report = found(finder);
  ASSERT_EQ(report.syncs.size(), 1U);
  EXPECT_EQ(report.syncs_found, 1);
  EXPECT_EQ(report.syncs[0].operation, "a call");
  EXPECT_EQ(report.syncs[0].kind, "stream synchronisation");
}

TEST_F(SyncFinderTest, AllocationsAreFoundInSteadyStepsOnly) {
  SyncFinder finder(kSimType, {}, {});
  {
    const SyncFinder::Step step(finder, /*steady=*/false);
    tell(HostWait::allocation);
  }
  EXPECT_EQ(found(finder).syncs_found, 0);
  {
    const SyncFinder::Step step(finder, /*steady=*/true);
    tell(HostWait::allocation);
    tell(HostWait::allocation);
  }
  EXPECT_EQ(found(finder).syncs_found, 2);
}

// cuBLAS makes a handle in the first product of a thread, and waits for the device.
TEST_F(SyncFinderTest, WhatALibrarySetsUpInAnOperatorOfAFirstStepIsNoFinding) {
  torch::Library library(torch::Library::DEF, "sidestream_handles", std::nullopt, __FILE__, __LINE__);
  library.def("product(Tensor x) -> Tensor", [](const at::Tensor& x) {
    tell(HostWait::device);
    return x;
  });
  const auto product = c10::Dispatcher::singleton()
                           .findSchemaOrThrow("sidestream_handles::product", "")
                           .typed<at::Tensor(const at::Tensor&)>();
  SyncFinder finder(kSimType, {}, {});
  {
    const SyncFinder::Step step(finder, /*steady=*/false);
    (void)product.call(sim_tensor_);
    EXPECT_EQ(found(finder).syncs_found, 0);
    tell(HostWait::device);
    EXPECT_EQ(found(finder).syncs_found, 1) << "what the program asks for itself";
  }
  const SyncFinder::Step step(finder, /*steady=*/true);
  (void)product.call(sim_tensor_);
  EXPECT_EQ(found(finder).syncs_found, 2);
}

// On a GPU the first item() pins the memory that it reads into.
TEST_F(SyncFinderTest, PinningHidesNotTheWaitOfItsOperator) {
  torch::Library library(torch::Library::DEF, "sidestream_pins", std::nullopt, __FILE__, __LINE__);
  library.def("pins_and_waits(Tensor x) -> Tensor", [](const at::Tensor& x) {
    tell(HostWait::pinning);
    tell(HostWait::stream);
    return x;
  });
  const auto pins_and_waits = c10::Dispatcher::singleton()
                                  .findSchemaOrThrow("sidestream_pins::pins_and_waits", "")
                                  .typed<at::Tensor(const at::Tensor&)>();
  const auto kinds = [&](const SyncFinder& finder) {
    std::multiset<std::string> names;
    for (const SyncFinding& sync : found(finder).syncs) {
      names.insert(sync.kind);
    }
    return names;
  };
  for (const bool steady : {false, true}) {
    SyncFinder finder(kSimType, {}, {});
    {
      const SyncFinder::Step step(finder, steady);
      (void)pins_and_waits.call(sim_tensor_);
    }
    const std::string waits = name_of(HostWait::data_dependent);
    EXPECT_EQ(kinds(finder), steady ? (std::multiset<std::string>{waits, name_of(HostWait::pinning)})
                                    : (std::multiset<std::string>{waits}));
  }
}

TEST_F(SyncFinderTest, WhatACaptureNeedsUnsettlesTheStepsAroundIt) {
  SyncFinder outer(kSimType, {}, {});
  SyncFinder inner(kSimType, {}, {});
  {
    const SyncFinder::Step around(outer, /*steady=*/true);
    {
      const SyncFinder::Step inside(inner, /*steady=*/true);
      {
        const SyncFinder::Pause pause;
        SyncFinder::unsettle();
      }
      tell(HostWait::allocation);
    }
    tell(HostWait::allocation);
  }
  EXPECT_EQ(found(inner).syncs_found, 0);
  EXPECT_EQ(found(outer).syncs_found, 0);
  EXPECT_EQ(outer.unsettled(), 1);
  SyncFinder::unsettle();
  EXPECT_EQ(outer.unsettled(), 1) << "there is no step";
}

TEST_F(SyncFinderTest, BackendsAreAskedOnlyForThreadsOfSteps) {
  EXPECT_FALSE(host_waits::heard());
  SyncFinder finder(kSimType, {}, {});
  EXPECT_FALSE(host_waits::heard());
  const SyncFinder::Step step(finder, false);
  EXPECT_TRUE(host_waits::heard());
  {
    const SyncFinder::Pause pause;
    EXPECT_FALSE(host_waits::heard());
  }
  {
    const OwnWaits own;
    EXPECT_FALSE(host_waits::heard());
  }
  std::thread([] { EXPECT_FALSE(host_waits::heard()); }).join();
}

TEST_F(SyncFinderTest, PausesAndOwnWaitsAreSilentAndNest) {
  SyncFinder finder(kSimType, {}, {});
  const SyncFinder::Step step(finder, false);
  {
    const SyncFinder::Pause pause;
    tell(HostWait::event);
    (void)sim_tensor_.sum().item<float>();
    {
      const SyncFinder::Pause again;
      tell(HostWait::event);
    }
    tell(HostWait::event);
  }
  {
    const OwnWaits own;
    tell(HostWait::event);
    {
      const OwnWaits more;
      tell(HostWait::event);
    }
    tell(HostWait::event);
  }
  EXPECT_EQ(found(finder).syncs_found, 0);
  tell(HostWait::event);
  EXPECT_EQ(found(finder).syncs_found, 1);
}

TEST_F(SyncFinderTest, StepsOfTwoFindersNest) {
  SyncFinder outer(kSimType, {}, {});
  SyncFinder inner(kSimType, {}, {});
  const SyncFinder::Step around(outer, false);
  {
    const SyncFinder::Step inside(inner, false);
    tell(HostWait::stream);
    EXPECT_EQ(found(inner).syncs_found, 1);
    EXPECT_EQ(found(outer).syncs_found, 0);
  }
  (void)sim_tensor_.sum().item<float>();
  ASSERT_EQ(found(outer).syncs.size(), 1U);
  EXPECT_EQ(found(outer).syncs[0].operation, "aten::item") << "the operators are still known";
}

TEST_F(SyncFinderTest, AnOperatorCountsOnceAndStandsForWhatItCalls) {
  SyncFinder finder(kSimType, {}, {});
  const SyncFinder::Step step(finder, false);
  for (std::int64_t i = 0; i < 5; ++i) {
    (void)sim_tensor_.to(at::kCPU);
  }
  const Report report = found(finder);
  ASSERT_EQ(report.syncs.size(), 1U);
  EXPECT_EQ(report.syncs[0].count, 5);
  EXPECT_EQ(report.syncs[0].operation, "aten::to");
}

// On a GPU one item() is a copy and a synchronisation.
TEST_F(SyncFinderTest, AnOperatorThatWaitsTwiceCountsOnceEachTimeItRuns) {
  torch::Library library(torch::Library::DEF, "sidestream_syncs", std::nullopt, __FILE__, __LINE__);
  library.def("waits_twice(Tensor x) -> Tensor", [](const at::Tensor& x) {
    tell(HostWait::pageable_copy);
    tell(HostWait::stream);
    return x;
  });
  const auto waits_twice = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("sidestream_syncs::waits_twice", "")
                               .typed<at::Tensor(const at::Tensor&)>();
  SyncFinder finder(kSimType, {}, {});
  const SyncFinder::Step step(finder, false);
  (void)waits_twice.call(sim_tensor_);
  (void)waits_twice.call(sim_tensor_);
  const Report report = found(finder);
  EXPECT_EQ(report.syncs_found, 2);
  for (const SyncFinding& sync : report.syncs) {
    EXPECT_EQ(sync.operation, "sidestream_syncs::waits_twice");
    EXPECT_EQ(sync.kind, "copy of pageable host memory");
  }
}

TEST_F(SyncFinderTest, OtherThreadsAreNotHeardAndAStepMayEndThere) {
  SyncFinder finder(kSimType, {}, {});
  auto step = std::make_unique<SyncFinder::Step>(finder, false);
  std::thread([&] {
    tell(HostWait::stream);
    step.reset();
    tell(HostWait::stream);
  }).join();
  tell(HostWait::stream);
  EXPECT_EQ(found(finder).syncs_found, 0);
  {
    const SyncFinder::Step next(finder, false);
    (void)sim_tensor_.sum().item<float>();
  }
  tell(HostWait::stream);
  ASSERT_EQ(found(finder).syncs.size(), 1U);
  EXPECT_EQ(found(finder).syncs[0].operation, "aten::item");
}

TEST_F(SyncFinderTest, WhatThePlaceThrowsStopsNothing) {
  SyncFinder finder(kSimType, []() -> WaitPlace { throw std::runtime_error("no place"); }, {});
  const SyncFinder::Step step(finder, false);
  EXPECT_NO_THROW(tell(HostWait::stream));
  EXPECT_EQ(sim_tensor_.sum().item<float>(), 16);
}

// A GPU tells what its driver is asked for; the operator explains it.
TEST_F(SyncFinderTest, TheOperatorExplainsWhatTheDriverIsAskedFor) {
  EXPECT_EQ(sync_kind(HostWait::stream, ""), HostWait::stream);
  EXPECT_EQ(sync_kind(HostWait::stream, "aten::_local_scalar_dense"), HostWait::value);
  EXPECT_EQ(sync_kind(HostWait::pageable_copy, "aten::_local_scalar_dense"), HostWait::value);
  EXPECT_EQ(sync_kind(HostWait::stream, "aten::copy_"), HostWait::blocking_copy);
  EXPECT_EQ(sync_kind(HostWait::stream, "aten::nonzero"), HostWait::data_dependent);
  EXPECT_EQ(sync_kind(HostWait::stream, "aten::index.Tensor"), HostWait::data_dependent);
  EXPECT_EQ(sync_kind(HostWait::data_dependent, "aten::equal"), HostWait::value);
  EXPECT_EQ(sync_kind(HostWait::pageable_copy, "aten::copy_"), HostWait::pageable_copy);
  EXPECT_EQ(sync_kind(HostWait::allocation, "aten::mm"), HostWait::allocation);
}

TEST_F(SyncFinderTest, EachKindHasANameAndARemedyAndExpertsAreNamed) {
  for (int k = 0; k <= static_cast<int>(HostWait::pinning); ++k) {
    const auto kind = static_cast<HostWait>(k);
    EXPECT_STRNE(name_of(kind), "");
    EXPECT_GT(std::string(remedy_for(kind)).size(), 20U);
  }
  EXPECT_NE(std::string(remedy_for(HostWait::data_dependent)).find("cannot avoid this"), std::string::npos);
}

__attribute__((noinline)) CallStack one_place() { return CallStack::here(0); }

TEST(CallStackTest, TheSamePlaceIsTheSameAndAnotherIsNot) {
  CallStack same[2];
  for (CallStack& stack : same) {
    stack = one_place();
  }
  const CallStack other = one_place();
  EXPECT_FALSE(same[0] < same[1] || same[1] < same[0]);
  EXPECT_TRUE(same[0] < other || other < same[0]);
  EXPECT_FALSE(other.frames(8).empty());
  EXPECT_LE(other.frames(3).size(), 3U);
  EXPECT_TRUE(CallStack().frames(8).empty());
}

}  // namespace
}  // namespace sidestream
