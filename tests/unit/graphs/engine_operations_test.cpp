// What the engine asks of the sim device.
#include <cstdint>
#include <string>

#include <gtest/gtest.h>

#include "engine_operations.h"
#include "sidestream/device.h"

namespace sidestream::testing_model {
namespace {

class EngineOperationsTest : public testing::TestWithParam<std::int64_t> {};

// On CUDA the same list holds (tests/gpu): the two backends are asked for the same, in the same order.
TEST_P(EngineOperationsTest, AreTheSameOnEveryBackend) {
  EXPECT_EQ(engine_operations(find_device("sim"), GetParam()), expected_engine_operations(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(SideStreams, EngineOperationsTest, testing::Values(0, 1, 2, 3),
                         [](const testing::TestParamInfo<std::int64_t>& info) {
                           return info.param == 0 ? std::string("eager") : "graphs_" + std::to_string(info.param);
                         });

}  // namespace
}  // namespace sidestream::testing_model
