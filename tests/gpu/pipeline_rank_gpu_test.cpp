// One rank of a pipeline on a GPU: layers in the orders of pipelines, with offload, bit for bit as plain training.
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "gpu/gpu_blocks.h"
#include "unit/graphs/rank_programs.h"
#include "unit/graphs/rank_training.h"

namespace sidestream::testing_model {
namespace {

class PipelineRankOnGpu : public gpu::GpuBlocks, public testing::WithParamInterface<RankParameter> {};

TEST_P(PipelineRankOnGpu, HasPlainGradients) {
  const auto& [program, way, chunks] = GetParam();
  std::int64_t offloaded = 0;
  train_rank(program, way, chunks, device_,
             [way = way, &offloaded](std::size_t step, const RankOrder&, const Report& report) {
               EXPECT_EQ(report.order_findings, std::vector<std::string>());
               EXPECT_TRUE(report.replays > 0 || way == RankWay::eager || step == 0);
               EXPECT_GT(report.checked_operations, 0);
               offloaded += report.offloaded_bytes;
             });
  // The latest groups of a set of callables stay: of few layers all.
  const bool may_stay = program.layers < 4 && (way == RankWay::callables || way == RankWay::ordered_callables);
  EXPECT_TRUE(offloaded > 0 || may_stay);
}

INSTANTIATE_TEST_SUITE_P(Orders, PipelineRankOnGpu,
                         testing::Combine(testing::ValuesIn(for_callables(rank_programs())),
                                          testing::Values(RankWay::eager, RankWay::calls, RankWay::shared,
                                                          RankWay::callables, RankWay::ordered_callables),
                                          testing::Values(RankChunks::none, RankChunks::ordered)),
                         name_of_rank);

}  // namespace
}  // namespace sidestream::testing_model
