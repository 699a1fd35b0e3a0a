// Faults planted in the order of engine and graphs, one rule taken out at a time: each is found by the journal's check, and each
// that can change a value by an order of the recorded steps as well. Printed as a table.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "observe/checked_runtime.h"
#include "observe/operator_observer.h"
#include "sidestream/device.h"
#include "sidestream/error.h"
#include "unit/graphs/engine_faults.h"
#include "unit/graphs/ordered_programs.h"
#include "unit/graphs/planted_faults.h"
#include "unit/graphs/recorded_steps.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream::testing_model {
namespace {

/// A finding without addresses, steps and fix, to tell one from another and for the table.
std::string short_form(std::string finding) {
  finding.resize(std::min(finding.size(), finding.find(", but nothing orders")));
  for (std::size_t begin = 0; (begin = finding.find("[0x", begin)) != std::string::npos;) {
    finding.replace(begin, finding.find('+', begin) + 1 - begin, "");
    finding.erase(finding.find(')', begin), 1);
  }
  for (const char* step : {", step ", " (step "}) {
    for (std::size_t begin = 0; (begin = finding.find(step, begin)) != std::string::npos;) {
      const std::size_t close = finding.find(')', begin);
      finding.erase(begin, close - begin + (step[0] == ',' ? 0 : 1));
    }
  }
  return finding;
}

/// The place, and the number in its list.
std::string name_of(const testing::TestParamInfo<EngineFault>& info) {
  std::string name = info.param.place;
  for (std::size_t colons = 0; (colons = name.find("::")) != std::string::npos;) {
    name.replace(colons, 2, "_");
  }
  return name + "_" + std::to_string(info.index);
}

class PlantedFaultTest : public testing::TestWithParam<EngineFault> {
 protected:
  static constexpr std::uint64_t kSeeds = 60;

  static void SetUpTestSuite() { std::printf("fault | program | found by | shown by | wrong bytes\n"); }

  struct Outcome {
    std::vector<std::string> findings;
    RecordedSteps::Wrong wrong;
  };

  Outcome run_faulty() const {
    const EngineFault& planted = GetParam();
    const NamedProgram named = testing_model::program(planted.program);
    const auto& expected = plain_gradients(named, device_);
    const auto checked = std::make_shared<CheckedRuntime>(make_runtime(device_));
    const auto faulty = std::make_shared<PlantedRuntime>(checked, planted.fault);
    const OperatorObserverGuard observing([&](const OperatorAccess& access) { checked->observe(access); });
    const auto program = named.make({checked, faulty});
    RecordedSteps steps(*program, [&](bool begins) { faulty->arm(begins); });
    const Outcome outcome{checked->findings(), steps.first_wrong(expected, kSeeds)};
    const std::string finding = outcome.findings.empty() ? "nothing" : short_form(outcome.findings.front());
    std::printf("%s: %s | %s | %s | %s | %zu\n", planted.place, planted.rule, planted.program, finding.c_str(),
                outcome.wrong.schedule.empty() ? planted.unshown : outcome.wrong.schedule.c_str(), outcome.wrong.bytes);
    EXPECT_GT(faulty->changed(), 0) << "the fault met no call";
    return outcome;
  }

  sim::OneThread one_thread_;
  c10::Device device_ = find_device("sim");
};

TEST_P(PlantedFaultTest, IsFound) {
  const Outcome outcome = run_faulty();
  EXPECT_FALSE(outcome.findings.empty());
  EXPECT_EQ(outcome.wrong.schedule.empty(), *GetParam().unshown != 0);
}

INSTANTIATE_TEST_SUITE_P(Engine, PlantedFaultTest, testing::ValuesIn(engine_faults()), name_of);

/// What another rule stands in for.
class CoveredFaultTest : public PlantedFaultTest {};

TEST_P(CoveredFaultTest, ChangesNoOrder) {
  const Outcome outcome = run_faulty();
  EXPECT_EQ(outcome.findings, std::vector<std::string>());
  EXPECT_EQ(outcome.wrong.schedule, "");
}

INSTANTIATE_TEST_SUITE_P(Engine, CoveredFaultTest, testing::ValuesIn(covered_faults()), name_of);

/// Faults in what a capture holds, seen as it is: the capture itself refuses most of them.
TEST(RefusedFaultTest, EventsThatDoNotStandForTheirGraphAreRefusedAtTheCapture) {
  const sim::OneThread one_thread;
  const c10::Device device = find_device("sim");
  for (const EngineFault& planted : engine_faults()) {
    if (planted.fault.act != Fault::Act::done_at_capture_begin) {
      continue;
    }
    const auto runtime = make_runtime(device);
    const auto runtime_with_fault = std::make_shared<PlantedRuntime>(runtime, planted.fault);
    runtime_with_fault->show_nodes();
    EXPECT_THROW(
        {
          const auto program = testing_model::program(planted.program).make({runtime, runtime_with_fault});
          (void)program->step(0);
          (void)program->step(1);
        },
        CaptureError)
        << planted.rule;
  }
}

}  // namespace
}  // namespace sidestream::testing_model
