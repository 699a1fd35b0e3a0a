#include "analysis/device_budget.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace sidestream {
namespace {

using Bytes = std::vector<std::uint64_t>;

/// All offloaded, as the first captures of an engine with a budget are.
MeasuredSequence all_offloaded(SequenceOrder order, const Bytes& bytes, const std::vector<LayerPace>& paces = {}) {
  const CopyWindow least{*std::max_element(bytes.begin(), bytes.end()), 0};
  const SequencePlan plan{least, bytes, copy_places(order, bytes, bytes, least)};
  return {std::move(order), bytes, bytes, plan, plan, paces.empty() ? std::vector<LayerPace>(bytes.size()) : paces};
}

/// Each graph has `rest` of its index beside the saved tensors.
void add_segments(MeasuredStep& step, const std::vector<std::int64_t>& rest) {
  const std::vector<std::int64_t> saved = step.sequences.back().on_device(step.sequences.back().plan);
  for (std::size_t i = 0; i < saved.size(); ++i) {
    step.segments.push_back({step.sequences.size() - 1, i, rest[i] + saved[i], 0});
  }
}

MeasuredStep one_sequence(std::size_t runs, const std::vector<std::int64_t>& rest) {
  MeasuredStep step;
  step.sequences.push_back(all_offloaded(nested_order(runs), Bytes(runs, 10)));
  add_segments(step, rest);
  return step;
}

TEST(DeviceBudgetTest, ABudgetForAllOffloadsNothing) {
  const auto forecast = forecast_within(one_sequence(6, std::vector<std::int64_t>(12, 100)), 160);
  ASSERT_TRUE(forecast);
  EXPECT_EQ(forecast->moved, 0);
  EXPECT_EQ(forecast->peak, 160);
}

TEST(DeviceBudgetTest, OffloadsNoMoreThanTheBudgetAsksFor) {
  for (std::int64_t budget = 120; budget < 160; ++budget) {
    const MeasuredStep step = one_sequence(6, std::vector<std::int64_t>(12, 100));
    const auto forecast = forecast_within(step, budget);
    ASSERT_TRUE(forecast) << budget;
    EXPECT_LE(forecast->peak, budget);
    EXPECT_EQ(forecast->moved, (160 - budget + 9) / 10 * 10) << "whole runs, of " << budget;
    for (std::uint64_t lag = 0; lag <= 60; ++lag) {
      const StepForecast other = forecast_step(step, lag);
      EXPECT_TRUE(other.peak > budget || other.moved >= forecast->moved) << budget << ", lag " << lag;
    }
  }
}

TEST(DeviceBudgetTest, WhatIsThereAtAnotherTimeCountsThen) {
  // Gradients grow while backward frees what was saved: 40 saved bytes with 100, or 10 with 130.
  std::vector<std::int64_t> rest(8, 100);
  rest[7] = 130;
  EXPECT_EQ(forecast_within(one_sequence(4, rest), 140)->moved, 0);
  rest[5] = 125;  // 125 and 30 of the second run and before
  const auto forecast = forecast_within(one_sequence(4, rest), 145);
  ASSERT_TRUE(forecast);
  EXPECT_GT(forecast->moved, 0);
  EXPECT_LE(forecast->peak, 145);
}

TEST(DeviceBudgetTest, IsNotSetIfAllOffloadedIsTooMuch) {
  const MeasuredStep step = one_sequence(6, std::vector<std::int64_t>(12, 100));
  EXPECT_FALSE(forecast_within(step, step.peak() - 1));
  EXPECT_TRUE(forecast_within(step, step.peak()));
}

TEST(DeviceBudgetTest, CountsWhatComesBeforeTheFirstGraph) {
  MeasuredStep step = one_sequence(2, std::vector<std::int64_t>(4, 100));
  step.peak_before = 500;
  EXPECT_FALSE(forecast_within(step, 499));
  EXPECT_EQ(forecast_within(step, 500)->peak, 500);
}

TEST(DeviceBudgetTest, CountsWhatCapturesTake) {
  MeasuredStep step = one_sequence(6, std::vector<std::int64_t>(12, 100));
  EXPECT_EQ(capture_peak(step, 0), 0);
  const std::vector<std::int64_t> saved = step.sequences.back().on_device(step.sequences.back().plan);
  for (std::size_t i = 0; i < saved.size(); ++i) {
    step.captures.push_back({0, i, 120 + saved[i], 0});
  }
  for (std::int64_t budget = 140; budget <= 180; ++budget) {
    const auto forecast = forecast_within(step, budget);
    ASSERT_TRUE(forecast) << budget;
    EXPECT_LE(capture_peak(step, forecast->lag), budget);
    EXPECT_EQ(forecast->moved, (180 - budget + 9) / 10 * 10) << "20 more than for the step, of " << budget;
    EXPECT_LE(forecast->peak, budget - 20) << "of a step alone";
  }
  EXPECT_FALSE(forecast_within(step, 139));
}

TEST(DeviceBudgetTest, SaysWhatAStepTookOtherwise) {
  const StepForecast forecast{0, 1000 << 20, 0.1, 0};
  const auto said = [&](std::int64_t mebibytes, double seconds) {
    return differences(forecast, 500 << 20, mebibytes << 20, seconds);
  };
  EXPECT_TRUE(said(0, 0).empty()) << "not measured";
  EXPECT_TRUE(said(1014, 0.109).empty());
  EXPECT_EQ(said(1016, 0.1), std::vector<std::string>{"the plan for Options::device_budget expected a peak of 1000.0 "
                                                      "MiB, and a step took 1016.0 MiB"});
  for (const double seconds : {0.089, 0.111}) {
    const std::vector<std::string> sentences = said(1000, seconds);
    ASSERT_EQ(sentences.size(), 1U) << seconds;
    EXPECT_EQ(sentences[0], "the plan for Options::device_budget expected a step of 100.0 ms, and one took " +
                                std::string(seconds < 0.1 ? "89.0" : "111.0") + " ms: a difference of more than 10%");
  }
  EXPECT_EQ(said(900, 0.2).size(), 2U);
  EXPECT_TRUE(differences({0, 1000, 0, 0}, 0, 1000, 5).empty()) << "no time was forecast";
}

TEST(DeviceBudgetTest, SequencesInFlightAddUp) {
  // Two microbatches: both forwards, then both backwards.
  MeasuredStep step;
  for (int microbatch = 0; microbatch < 2; ++microbatch) {
    step.sequences.push_back(all_offloaded(nested_order(4), Bytes(4, 10)));
  }
  const std::vector<std::int64_t> saved = step.sequences[0].on_device(step.sequences[0].plan);
  const auto add = [&](std::size_t sequence, std::size_t first, std::size_t other) {
    for (std::size_t i = first; i < first + 4; ++i) {
      step.segments.push_back({sequence, i, 100 + saved[i] + static_cast<std::int64_t>(other), 0});
    }
  };
  add(0, 0, 0);
  add(1, 0, static_cast<std::size_t>(saved[3]));
  add(1, 4, static_cast<std::size_t>(saved[3]));
  add(0, 4, 0);
  EXPECT_EQ(forecast_within(step, 180)->moved, 0);
  const auto forecast = forecast_within(step, 140);
  ASSERT_TRUE(forecast);
  EXPECT_LE(forecast->peak, 140);
  EXPECT_EQ(forecast->moved, 40) << "each may have 20";
}

/// Copies at half of the rate that graphs need; the link reaches `part` of its rate.
MeasuredStep timed(double part) {
  const std::vector<LayerPace> paces(8, {1, 2});
  MeasuredStep step;
  step.sequences.push_back(all_offloaded(nested_order(8), Bytes(8, 10), paces));
  add_segments(step, std::vector<std::int64_t>(16, 100));
  step.link = LinkPace{5, 5};
  const MeasuredSequence& sequence = step.sequences.front();
  const double seconds = pass_seconds(sequence.order, sequence.selected, sequence.selected, sequence.plan.window, paces,
                                      {5 * part, 5 * part});
  step.sequences.front().waited = seconds - 24;
  step.seconds = seconds + 3;  // and 3 between the graphs
  return step;
}

TEST(DeviceBudgetTest, WithoutCopiesAStepTakesWhatItsGraphsTake) {
  EXPECT_DOUBLE_EQ(forecast_within(timed(1), 1000)->seconds, 24 + 3);
}

TEST(DeviceBudgetTest, LearnsTheLinkFromTheWaits) {
  for (const double part : {0.6, 0.8, 1.0}) {
    const MeasuredStep step = timed(part);
    const SequencePlan plan = step.sequences.front().plan_with(40);
    const double expected = pass_seconds(nested_order(8), Bytes(8, 10), plan.offloaded, plan.window,
                                         step.sequences.front().paces, {5 * part, 5 * part});
    EXPECT_NEAR(forecast_step(step, 40).seconds, expected + 3, 1e-6) << part;
  }
}

TEST(DeviceBudgetTest, KnowsNoTimeWithoutAClock) {
  EXPECT_EQ(forecast_within(one_sequence(4, std::vector<std::int64_t>(8, 100)), 120)->seconds, 0);
}

}  // namespace
}  // namespace sidestream
