// Programs run again in every order that streams and events allow: the gradients of plain training, and a journal without a
// finding.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "observe/checked_runtime.h"
#include "observe/operator_observer.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "unit/graphs/ordered_programs.h"
#include "unit/graphs/recorded_steps.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream {
namespace {

using testing_model::NamedProgram;
using testing_model::RecordedSteps;

class ProgramOrderTest : public testing::TestWithParam<std::string> {
 protected:
  static constexpr std::uint64_t kSeeds = 100;

  sim::OneThread one_thread_;
  c10::Device device_ = find_device("sim");
  const NamedProgram& program_ = testing_model::program(GetParam());
  const std::vector<std::byte>& expected_ = testing_model::plain_gradients(program_, device_);
};

TEST_P(ProgramOrderTest, EveryOrderGivesTheGradientsOfPlainTraining) {
  const auto runtime = make_runtime(device_);
  const auto program = program_.make({runtime, runtime});
  RecordedSteps steps(*program);
  const RecordedSteps::Wrong wrong = steps.first_wrong(expected_, kSeeds);
  EXPECT_EQ(wrong.schedule, "") << wrong.bytes << " bytes differ";
  EXPECT_GT(program->engine()->report().pinned_bytes, 0);
}

// A model that lacked a wait of its own would prove nothing.
TEST_P(ProgramOrderTest, PlainTrainingIsInOrderItself) {
  const auto program = program_.make({make_runtime(device_), nullptr});
  RecordedSteps steps(*program);
  EXPECT_EQ(steps.first_wrong(expected_, kSeeds / 5).schedule, "");
}

TEST_P(ProgramOrderTest, NothingIsUnordered) {
  const auto checked = std::make_shared<CheckedRuntime>(make_runtime(device_));
  const OperatorObserverGuard observing([&](const OperatorAccess& access) { checked->observe(access); });
  const auto program = program_.make({checked, checked});
  for (const std::int64_t s : {0, 1, 2, 3}) {
    checked->begin_step(static_cast<std::uint64_t>(s + 1));
    (void)program->step(s);
  }
  EXPECT_GT(checked->operations(), 100);
  EXPECT_EQ(checked->findings(), std::vector<std::string>());
}

std::vector<std::string> names() {
  std::vector<std::string> result;
  for (const NamedProgram& each : testing_model::programs()) {
    result.push_back(each.name);
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(Programs, ProgramOrderTest, testing::ValuesIn(names()),
                         [](const testing::TestParamInfo<std::string>& info) { return info.param; });

}  // namespace
}  // namespace sidestream
