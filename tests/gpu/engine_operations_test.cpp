// What the engine asks of a GPU is what it asks of the sim device, in the same order on the same streams.
#include <cstdint>
#include <string>

#include "engine_operations.h"
#include "gpu/gpu_fixture.h"

namespace sidestream::testing_model {
namespace {

class GpuEngineOperationsTest : public gpu::Gpu, public testing::WithParamInterface<std::int64_t> {};

TEST_P(GpuEngineOperationsTest, AreTheSameOnEveryBackend) {
  EXPECT_EQ(engine_operations(tested_gpu(), GetParam()), expected_engine_operations(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(SideStreams, GpuEngineOperationsTest, testing::Values(0, 1, 2, 3),
                         [](const testing::TestParamInfo<std::int64_t>& info) {
                           return info.param == 0 ? std::string("eager") : "graphs_" + std::to_string(info.param);
                         });

}  // namespace
}  // namespace sidestream::testing_model
