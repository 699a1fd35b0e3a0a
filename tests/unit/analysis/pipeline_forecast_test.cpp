#include "sidestream/pipeline_forecast.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <map>
#include <random>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "analysis/copy_places.h"
#include "sidestream/error.h"
#include "tests/expect_throws.h"
#include "tests/unit/analysis/pipeline_orders.h"

namespace sidestream {
namespace {

using ForecastKind = PipelineStep::Kind;

constexpr double kNear = 1e-9;  // seconds

/// Layers whose forward takes 1 second and whose backward takes 2, and which save 10 bytes.
PipelineCosts layers_costs(std::int64_t layers) {
  PipelineCosts costs;
  costs.layers = layers;
  costs.forward_seconds = 1;
  costs.backward_seconds = 2;
  costs.saved_bytes = 10;
  return costs;
}

/// All that is saved is offloadable. Copies take these times; at most one layer's copy trails.
PipelineCosts copied_costs(std::int64_t layers, double to_host_seconds, double to_device_seconds) {
  PipelineCosts costs = layers_costs(layers);
  costs.offloadable_bytes = costs.saved_bytes;
  costs.to_host = 10 / to_host_seconds;
  costs.to_device = 10 / to_device_seconds;
  costs.lag = 10;
  costs.lookahead = 0;
  return costs;
}

TEST(PipelineForecastTest, OneRankWithoutOffloadTakesTheSumOfItsLayers) {
  PipelineCosts costs = layers_costs(2);
  costs.chunk_bytes = 100;
  costs.forward_more_bytes = 3;
  costs.backward_more_bytes = 5;
  const std::vector<RankForecast> ranks = forecast_pipeline({1, 1, 3}, costs);
  ASSERT_EQ(ranks.size(), 1U);
  EXPECT_EQ(ranks[0].seconds, 3 * 2 * (1 + 2));
  EXPECT_EQ(ranks[0].busy_seconds, ranks[0].seconds);
  EXPECT_EQ(ranks[0].idle_seconds, 0);
  EXPECT_EQ(ranks[0].waited_seconds, 0);
  EXPECT_EQ(ranks[0].peak_bytes, 2 * 10 + 100 + 5);
  EXPECT_EQ(ranks[0].offloaded_bytes, 0);
  costs.forward_more_bytes = 7;
  EXPECT_EQ(forecast_rank({1, 1, 3}, costs, 0).peak_bytes, 2 * 10 + 100 + 7);
}

TEST(PipelineForecastTest, EachForwardWaitsForTheCopyOfTheLayerBeforeIfTheLinkIsSlow) {
  // The last of five layers stays. A copy takes 2.5 seconds, of which a forward hides 1.
  const RankForecast rank = forecast_rank({1, 1, 1}, copied_costs(5, 2.5, 0.5), 0);
  EXPECT_NEAR(rank.waited_seconds, 4 * (2.5 - 1), kNear);
  EXPECT_NEAR(rank.seconds, 5 * 3 + rank.waited_seconds, kNear);
  EXPECT_EQ(rank.offloaded_bytes, 4 * 10);
}

TEST(PipelineForecastTest, EachBackwardWaitsForItsReloadIfTheLinkIsSlow) {
  const RankForecast rank = forecast_rank({1, 1, 1}, copied_costs(5, 0.5, 3), 0);
  EXPECT_NEAR(rank.waited_seconds, 4 * (3 - 2), kNear);
  EXPECT_NEAR(rank.steps.back().waited, rank.waited_seconds, kNear) << "all in the backward";
  std::vector<std::int64_t> layers;
  for (const ForecastCopy& copy : rank.to_device) {
    layers.push_back(copy.layer);
  }
  EXPECT_EQ(layers, (std::vector<std::int64_t>{3, 2, 1, 0}));
}

TEST(PipelineForecastTest, RanksWaitForTheFirstAndTheLastMicrobatch) {
  for (std::int64_t ranks = 1; ranks <= 5; ++ranks) {
    for (const RankForecast& rank : forecast_pipeline({ranks, 1, 6}, layers_costs(3))) {
      EXPECT_NEAR(rank.idle_seconds, static_cast<double>(ranks - 1) * 3 * (1 + 2), kNear) << ranks << " ranks";
    }
  }
}

TEST(PipelineForecastTest, ASendIsOnTheWayToTheNextVirtualStageAndBack) {
  PipelineCosts costs = layers_costs(1);
  costs.send_seconds = 0.25;
  EXPECT_NEAR(forecast_pipeline({3, 1, 1}, costs)[0].seconds, 3 * (1 + 2) + 2 * 2 * 0.25, kNear);
  EXPECT_NEAR(forecast_pipeline({3, 2, 1}, costs)[0].seconds, 6 * (1 + 2) + 2 * 5 * 0.25, kNear);
  EXPECT_NEAR(forecast_rank({3, 2, 1}, costs, 1).seconds, 2 * (1 + 2), kNear) << "alone, nothing is awaited";
}

TEST(PipelineForecastTest, ARankKeepsAChunkForItselfAndForEachRankAfterIt) {
  PipelineCosts costs = layers_costs(3);
  costs.chunk_bytes = 7;
  const std::vector<RankForecast> ranks = forecast_pipeline({4, 1, 8}, costs);
  for (std::int64_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(ranks[static_cast<std::size_t>(rank)].peak_bytes, (4 - rank) * (3 * 10 + 7)) << "rank " << rank;
    EXPECT_EQ(ranks[static_cast<std::size_t>(rank)].peak_bytes_without_offload, (4 - rank) * (3 * 10 + 7));
  }
}

TEST(PipelineForecastTest, OffloadLowersThePeakToWhatTheEnginesPlacesLeave) {
  PipelineCosts costs = copied_costs(3, 0.1, 0.1);
  costs.saved_bytes = 14;
  costs.lag = 20;
  const SequenceOrder order = one_forward_one_backward(/*calls=*/3, /*warm_up=*/3, /*microbatches=*/8);
  std::vector<std::uint64_t> offloaded(order.runs(), 10);
  const std::vector<bool> stays = needed_immediately(order, offloaded, {20, 0});
  std::int64_t bytes = 0;
  for (std::size_t run = 0; run < order.runs(); ++run) {
    offloaded[run] = stays[run] ? 0 : 10;
    bytes += stays[run] ? 0 : 10;
  }
  const auto places = copy_places(order, std::vector<std::uint64_t>(order.runs(), 10), offloaded, {20, 0});
  std::int64_t peak = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    std::int64_t now = 0;
    for (std::size_t run = 0; run < order.runs(); ++run) {
      const bool pending = order.forward_index(run) <= i && i <= order.backward_index(run);
      const bool away = !stays[run] && places[run].released_at <= i && i < places[run].reload_at;
      now += pending ? (away ? 4 : 14) : 0;
    }
    peak = std::max(peak, now);
  }
  const RankForecast rank = forecast_rank({4, 1, 8}, costs, 0);
  EXPECT_EQ(rank.peak_bytes, peak);
  EXPECT_LT(rank.peak_bytes, rank.peak_bytes_without_offload);
  EXPECT_EQ(rank.offloaded_bytes, bytes);
}

// docs/measurements/order_6192fa7_h200.json: the first of four ranks with three layers.
TEST(PipelineForecastTest, SavesTheBytesThatWereMeasuredOnAGpu) {
  PipelineCosts costs;
  costs.layers = 3;
  costs.forward_seconds = 7.1e-3;
  costs.backward_seconds = 15.6e-3;
  costs.saved_bytes = 1376780288;
  costs.offloadable_bytes = 370147328;
  costs.to_host = 55.3e9;
  costs.to_device = 55.4e9;
  costs.lag = 3 * costs.offloadable_bytes;
  const RankForecast rank = forecast_rank({4, 1, 8}, costs, 0);
  EXPECT_EQ(rank.offloaded_bytes, 7773093888);
  EXPECT_EQ(rank.peak_bytes_without_offload - rank.peak_bytes, 17696568320 - 15105537024);
}

TEST(PipelineForecastTest, DelayedWeightGradientsFillBubblesAndKeepMemory) {
  PipelineCosts costs = layers_costs(2);
  costs.weights_seconds = 1;
  costs.for_weights_bytes = 4;
  const RankForecast alone = forecast_rank({1, 1, 1, 0, true}, costs, 0);
  EXPECT_EQ(alone.seconds, 2 * (1 + 2));
  EXPECT_EQ(alone.live[alone.live.size() - 3].bytes, 2 * 4) << "after the backward of both layers";
  EXPECT_EQ(alone.live.back().bytes, 0);
  EXPECT_EQ(forecast_pipeline({4, 1, 8, 0, true}, costs)[0].idle_seconds, 3 * 2 * (1 + 1 - 1));
  EXPECT_EQ(forecast_pipeline({4, 1, 8}, costs)[0].idle_seconds, 3 * 2 * (1 + 2)) << "not delayed";
}

void expect_one_at_a_time(const std::vector<ForecastCopy>& copies) {
  for (std::size_t i = 1; i < copies.size(); ++i) {
    EXPECT_GE(copies[i].begin, copies[i - 1].end) << "copy " << i;
  }
}

/// Each chunk's backward ends after its reloads, which begin after their offloads.
void expect_copies_in_order(const RankForecast& rank) {
  std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t>, double> offloaded;
  std::map<std::pair<std::int64_t, std::int64_t>, double> backward;
  for (const ForecastCopy& copy : rank.to_host) {
    offloaded[{copy.stage, copy.microbatch, copy.layer}] = copy.end;
  }
  for (const ForecastStep& timed : rank.steps) {
    if (timed.step.kind == ForecastKind::backward) {
      backward[{timed.step.stage, timed.step.microbatch}] = timed.end;
    }
  }
  for (const ForecastCopy& copy : rank.to_device) {
    EXPECT_GE(copy.begin, offloaded.at({copy.stage, copy.microbatch, copy.layer}) - kNear);
    EXPECT_LE(copy.end, (backward.at({copy.stage, copy.microbatch})) + kNear);
  }
  EXPECT_EQ(rank.to_host.size(), rank.to_device.size());
}

void expect_consistent(const RankForecast& rank, const PipelineShape& shape, const PipelineCosts& costs) {
  const double chunks = static_cast<double>(shape.stages * shape.microbatches * costs.layers);
  EXPECT_NEAR(rank.busy_seconds, chunks * (costs.forward_seconds + costs.backward_seconds), kNear);
  EXPECT_GE(rank.idle_seconds, -kNear);
  EXPECT_GE(rank.waited_seconds, -kNear);
  EXPECT_NEAR(rank.seconds, rank.busy_seconds + rank.idle_seconds + rank.waited_seconds, kNear);
  for (std::size_t i = 1; i < rank.steps.size(); ++i) {
    EXPECT_GE(rank.steps[i].begin, rank.steps[i - 1].end);
  }
  expect_one_at_a_time(rank.to_host);
  expect_one_at_a_time(rank.to_device);
  expect_copies_in_order(rank);
  std::int64_t most = 0;
  double time = 0;
  for (const ForecastMemory& at : rank.live) {
    EXPECT_GE(at.bytes, 0);
    EXPECT_GE(at.time, time);
    time = at.time;
    most = std::max(most, at.bytes);
  }
  EXPECT_EQ(rank.live.back().bytes, 0);
  EXPECT_EQ(rank.peak_bytes, most);
  EXPECT_LE(rank.peak_bytes, rank.peak_bytes_without_offload);
  EXPECT_EQ(rank.offloaded_bytes, static_cast<std::int64_t>(rank.to_host.size()) * costs.offloadable_bytes);
}

TEST(PipelineForecastTest, AnyForecastIsConsistent) {
  std::mt19937 random(1);
  const auto below = [&](std::int64_t bound) { return static_cast<std::int64_t>(random() % bound); };
  int waited = 0;
  int offloaded = 0;
  for (int i = 0; i < 400; ++i) {
    const PipelineShape shape{1 + below(5), 1 + below(3), 1 + below(10), 0, below(2) == 1};
    PipelineCosts costs;
    costs.layers = 1 + below(4);
    costs.forward_seconds = 0.25 * static_cast<double>(below(8));
    costs.backward_seconds = 0.25 * static_cast<double>(below(12));
    costs.weights_seconds = costs.backward_seconds / 2;
    costs.send_seconds = 0.125 * static_cast<double>(below(3));
    costs.saved_bytes = below(100);
    costs.offloadable_bytes = below(costs.saved_bytes + 1);
    costs.for_weights_bytes = below(50);
    costs.chunk_bytes = below(50);
    costs.forward_more_bytes = below(50);
    costs.backward_more_bytes = below(50);
    costs.to_host = static_cast<double>(1 + below(200));
    costs.to_device = static_cast<double>(1 + below(200));
    costs.lag = below(2) == 1 ? std::optional(below(200)) : std::nullopt;
    costs.lookahead = below(2) == 1 ? std::optional(below(200)) : std::nullopt;
    SCOPED_TRACE(i);
    PipelineCosts plain = costs;
    plain.offloadable_bytes = 0;
    const std::vector<RankForecast> ranks = forecast_pipeline(shape, costs);
    ASSERT_EQ(static_cast<std::int64_t>(ranks.size()), shape.ranks);
    EXPECT_GE(ranks[0].seconds, forecast_pipeline(shape, plain)[0].seconds - kNear) << "copies gain no time";
    for (std::int64_t rank = 0; rank < shape.ranks; ++rank) {
      const RankForecast& forecast = ranks[static_cast<std::size_t>(rank)];
      expect_consistent(forecast, shape, costs);
      const RankForecast alone = forecast_rank(shape, costs, rank);
      expect_consistent(alone, shape, costs);
      EXPECT_NEAR(alone.idle_seconds, 0, kNear);
      EXPECT_EQ(alone.peak_bytes, forecast.peak_bytes) << "other ranks change the times only";
      waited += forecast.waited_seconds > 0 ? 1 : 0;
      offloaded += forecast.offloaded_bytes > 0 ? 1 : 0;
    }
  }
  EXPECT_GT(offloaded, 300);
  EXPECT_GT(waited, 300);
}

TEST(PipelineForecastTest, WithoutCostsOfCopiesItAgreesWithPipelineTimes) {
  for (const bool delay : {false, true}) {
    const PipelineShape shape{4, 2, 8, 0, delay};
    PipelineCosts costs = layers_costs(1);
    costs.weights_seconds = 1;
    std::vector<std::vector<PipelineStep>> orders;
    for (std::int64_t rank = 0; rank < shape.ranks; ++rank) {
      orders.push_back(pipeline_order(shape, rank));
    }
    const std::vector<std::vector<TimedStep>> times = pipeline_times(orders);
    const std::vector<RankForecast> ranks = forecast_pipeline(shape, costs);
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      ASSERT_EQ(ranks[rank].steps.size(), times[rank].size());
      for (std::size_t i = 0; i < times[rank].size(); ++i) {
        EXPECT_EQ(ranks[rank].steps[i].step, times[rank][i].step);
        EXPECT_EQ(ranks[rank].steps[i].begin, static_cast<double>(times[rank][i].begin));
        EXPECT_EQ(ranks[rank].steps[i].end, static_cast<double>(times[rank][i].end));
      }
    }
  }
}

template <class Change>
void forecast_changed(const Change& change) {
  PipelineCosts costs = copied_costs(2, 1, 1);
  change(costs);
  (void)forecast_pipeline({2, 1, 4}, costs);
}

TEST(PipelineForecastTest, RefusesCostsOutOfRange) {
  constexpr double kNoNumber = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  using Costs = PipelineCosts;
  const auto refused = [](const char* text, auto Costs::*field, auto value) {
    EXPECT_THROWS(UsageError, text, forecast_changed([&](Costs& costs) { costs.*field = value; }));
  };
  refused("a layer's forward takes -1 seconds; it must be 0 to 1e+06", &Costs::forward_seconds, -1.0);
  refused("a layer's backward takes nan seconds", &Costs::backward_seconds, kNoNumber);
  refused("a send takes inf seconds", &Costs::send_seconds, kInfinite);
  refused("weight gradients take 3 of the 2 seconds of its backward", &Costs::weights_seconds, 3.0);
  refused("the link carries 0 bytes a second to the host; give the rate", &Costs::to_host, 0.0);
  refused("the link carries nan bytes a second to the device", &Costs::to_device, kNoNumber);
  refused("a layer saves -1 bytes; it must be 0 to 4398046511104", &Costs::saved_bytes, -1);
  refused("a layer offloads 11 bytes, but saves only 10; offload at most what it saves", &Costs::offloadable_bytes, 11);
  refused("a chunk keeps -2 bytes", &Costs::chunk_bytes, -2);
  refused("the lag is -3 bytes", &Costs::lag, -3);
  refused("a chunk has 0 layers; it must have at least 1", &Costs::layers, 0);
  refused("8 chunks with 8193 layers each is too large; at most 65536", &Costs::layers, 8193);
  EXPECT_THROWS(UsageError, "a pipeline has 0 ranks", (void)forecast_pipeline({0, 1, 1}, {}));
  EXPECT_THROWS(UsageError, "rank 2 is not one of the pipeline's ranks, 0 to 1", (void)forecast_rank({2, 1, 1}, {}, 2));
  EXPECT_NO_THROW((void)forecast_pipeline({2, 1, 4}, {})) << "without offload there is no link";
}

}  // namespace
}  // namespace sidestream
