// One rank of a pipeline: its model parts run the order of a schedule, with offload on, eagerly and graphed.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "models/layer_stack.h"
#include "sidestream/device.h"
#include "sidestream/pipeline_order.h"
#include "unit/graphs/rank_pipeline.h"
#include "unit/graphs/rank_programs.h"
#include "unit/graphs/rank_training.h"

namespace sidestream::testing_model {
namespace {

/// Bytes of the two largest groups of a layer: by default so much waits for its copies, so a group whose backward comes before that stays.
constexpr std::int64_t kMargin = 2 * 16 * 4 * kHidden * static_cast<std::int64_t>(sizeof(float));

/// What is known of the orders that a rank has run, and what the report must say after the next one.
class RankExpectation {
 public:
  RankExpectation(const RankProgram& program, RankWay way, RankChunks chunks)
      : program_(program), way_(way), chunks_(chunks), in_flight_(program.place.parts) {}

  /// After a step with `order`.
  void check(std::size_t step, const RankOrder& order, const Report& report) {
    bool known = step > 0;  // captures and pinned memory are there
    if (chunks_ == RankChunks::ordered && (way_ == RankWay::calls || way_ == RankWay::shared)) {
      // In order each microbatch of a step has captures of its own, which replay in that order.
      known = !counts_.insert(program_.microbatches[step]).second && known;
    }
    // Which calls run eagerly in shared memory depends on the order. They are planned as in the latest step in which one found no pinned
    // memory.
    const bool others_planned =
        way_ == RankWay::shared && step > 0 && program_.microbatches[step] != program_.microbatches[step - 1];
    const std::vector<std::size_t> in_flight = most_in_flight(program_.place, order);
    for (std::size_t p = 0; p < in_flight.size(); ++p) {
      known = known && in_flight[p] <= in_flight_[p];
      in_flight_[p] = std::max(in_flight_[p], in_flight[p]);
    }
    EXPECT_EQ(report.order_findings, std::vector<std::string>());
    EXPECT_LE(known ? report.refused_bytes : 0, others_planned ? kMargin : 0);
    if (known && way_ == RankWay::calls) {
      const auto evaluated = std::count_if(order.begin(), order.end(),
                                           [](const RankWork& work) { return work.kind == RankWork::Kind::evaluate; });
      EXPECT_EQ(report.eager_calls - eager_calls_, evaluated * static_cast<std::int64_t>(program_.layers));
    }
    eager_calls_ = report.eager_calls;
    if (chunks_ != RankChunks::none) {
      check_chunks(order, report);
    }
    if (way_ == RankWay::eager) {
      check_groups(step, order, report);
    } else if (step > 0) {
      EXPECT_GT(report.replays, 0);
      const bool stays = program_.layers < 4 || (program_.cut() && chunks_ == RankChunks::none &&
                                                 (way_ == RankWay::calls || way_ == RankWay::shared));
      EXPECT_TRUE(report.offloaded_bytes > 0 || stays);
    }
  }

 private:
  /// All that is offloaded is offloaded in a chunk.
  void check_chunks(const RankOrder& order, const Report& report) const {
    std::vector<PipelineStep> forwards = order_of_chunks(order, program_.layers);
    std::erase_if(forwards, [](const PipelineStep& step) { return step.kind != PipelineStep::Kind::forward; });
    ASSERT_EQ(report.chunks.size(), forwards.size());
    std::int64_t offloaded = 0;
    for (std::size_t i = 0; i < forwards.size(); ++i) {
      EXPECT_EQ(report.chunks[i].stage, forwards[i].stage);
      EXPECT_EQ(report.chunks[i].microbatch, forwards[i].microbatch);
      offloaded += report.chunks[i].offloaded_bytes;
    }
    EXPECT_EQ(offloaded, report.offloaded_bytes);
  }
  /// Eager groups follow the order that the step was given, or that of the step before.
  void check_groups(std::size_t step, const RankOrder& order, const Report& report) {
    repeats_ = step > 0 && program_.microbatches[step] == program_.microbatches[step - 1] ? repeats_ + 1 : 0;
    if (step == 0) {
      all_bytes_ = report.offloaded_bytes;
    }
    const bool told = chunks_ == RankChunks::ordered && program_.extra == RankExtra::none && step > 1;
    if (repeats_ > 1 || told) {
      EXPECT_EQ(report.inline_reloads, 0);
    }
    if (repeats_ == step && step > 0 && program_.extra == RankExtra::none) {
      EXPECT_EQ(all_bytes_ - report.offloaded_bytes, kMargin * needed_immediately(order));
    }
  }
  /// How many chunks run no other forward between their forward and their backward.
  static std::int64_t needed_immediately(const RankOrder& order) {
    std::int64_t count = 0;
    RankWork latest;
    for (const RankWork& work : order) {
      if (work.kind == RankWork::Kind::forward) {
        latest = work;
      } else if (work.kind == RankWork::Kind::backward && work.part == latest.part &&
                 work.microbatch == latest.microbatch) {
        ++count;
      }
    }
    return count;
  }

  const RankProgram& program_;
  RankWay way_;
  RankChunks chunks_;
  std::vector<std::size_t> in_flight_;  // by part: the most so far
  std::set<std::size_t> counts_;        // of microbatches, in the steps so far
  std::int64_t eager_calls_ = 0;
  std::int64_t all_bytes_ = 0;  // of all groups, in the first step
  std::size_t repeats_ = 0;     // steps in a row like the one before them
};

class PipelineRankTest : public testing::TestWithParam<RankParameter> {
 protected:
  static void train() {
    const auto& [program, way, chunks] = GetParam();
    RankExpectation expectation(program, way, chunks);
    train_rank(program, way, chunks, find_device("sim"),
               [&](std::size_t step, const RankOrder& order, const Report& report) {
                 expectation.check(step, order, report);
               });
  }
};

TEST_P(PipelineRankTest, HasPlainGradients) { train(); }

const auto rank_ways = testing::Values(RankWay::eager, RankWay::calls, RankWay::shared, RankWay::callables);

INSTANTIATE_TEST_SUITE_P(Orders, PipelineRankTest,
                         testing::Combine(testing::ValuesIn(rank_programs()), rank_ways,
                                          testing::Values(RankChunks::none, RankChunks::ordered)),
                         name_of_rank);
std::vector<RankProgram> callable_orders() {
  std::vector<RankProgram> programs = rank_programs();
  const std::vector<RankProgram> deep = deep_programs();
  programs.insert(programs.end(), deep.begin(), deep.end());
  return for_callables(std::move(programs));
}
INSTANTIATE_TEST_SUITE_P(OfCallables, PipelineRankTest,
                         testing::Combine(testing::ValuesIn(callable_orders()),
                                          testing::Values(RankWay::ordered_callables),
                                          testing::Values(RankChunks::none, RankChunks::ordered)),
                         name_of_rank);
INSTANTIATE_TEST_SUITE_P(Random, PipelineRankTest,
                         testing::Combine(testing::ValuesIn(random_programs()), rank_ways,
                                          testing::Values(RankChunks::none, RankChunks::begun, RankChunks::ordered)),
                         name_of_rank);
INSTANTIATE_TEST_SUITE_P(RandomOfCallables, PipelineRankTest,
                         testing::Combine(testing::ValuesIn(random_callable_programs()),
                                          testing::Values(RankWay::ordered_callables),
                                          testing::Values(RankChunks::none, RankChunks::ordered)),
                         name_of_rank);
INSTANTIATE_TEST_SUITE_P(Deep, PipelineRankTest,
                         testing::Combine(testing::ValuesIn(deep_programs()), rank_ways,
                                          testing::Values(RankChunks::none, RankChunks::begun, RankChunks::ordered)),
                         name_of_rank);

/// Takes some minutes: `--gtest_also_run_disabled_tests --gtest_filter='*EveryPipelineRank*'`.
class DISABLED_EveryPipelineRankTest : public PipelineRankTest {};
TEST_P(DISABLED_EveryPipelineRankTest, HasPlainGradients) { train(); }
const auto all_ways =
    testing::Values(RankWay::eager, RankWay::calls, RankWay::shared, RankWay::callables, RankWay::ordered_callables);
INSTANTIATE_TEST_SUITE_P(All, DISABLED_EveryPipelineRankTest,
                         testing::Combine(testing::ValuesIn(every_order(RankSchedule::one_forward_one_backward)),
                                          all_ways, testing::Values(RankChunks::none, RankChunks::ordered)),
                         name_of_rank);
INSTANTIATE_TEST_SUITE_P(ZeroBubble, DISABLED_EveryPipelineRankTest,
                         testing::Combine(testing::ValuesIn(every_order(RankSchedule::zero_bubble)), all_ways,
                                          testing::Values(RankChunks::none, RankChunks::ordered)),
                         name_of_rank);

}  // namespace
}  // namespace sidestream::testing_model
