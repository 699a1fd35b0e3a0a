#include "tools/cli/training_result.h"

#include <csignal>
#include <sstream>
#include <string>

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "expect_throws.h"
#include "sidestream/error.h"

namespace sidestream::cli {
namespace {

constexpr std::int64_t kMebibyte = 1 << 20;

ModeResult mode(const std::string& name, std::int64_t live, std::int64_t offloaded, std::int64_t in_flight = 0) {
  ModeResult result;
  result.name = name;
  result.steps = 5;
  result.step_seconds = 0.25;
  result.live = live * kMebibyte;
  result.offload.bytes_per_step = offloaded * kMebibyte;
  result.offload.in_flight = in_flight * kMebibyte;
  return result;
}

TrainingResult sample() {
  TrainingResult result;
  result.device_name = "device";
  result.mode = "graphs+offload";
  result.byte_entropy = 3.2;
  result.steps_done = 1234;
  result.held_out = {5.6, 2.5};
  result.modes = {mode("eager", 100, 0), mode("graphs", 130, 0), mode("graphs+offload", 90, 50, 10)};
  return result;
}

/// The table has a line that begins with `name` and ends with `cell`.
bool has_row(const std::string& table, const std::string& name, const std::string& cell) {
  std::istringstream lines(table);
  for (std::string line; std::getline(lines, line);) {
    if (line.find(name) == line.find_first_not_of(' ') && line.ends_with(" " + cell)) {
      return true;
    }
  }
  return false;
}

TEST(TrainingResult, ReductionComparesLikeWithLike) {
  const TrainingResult result = sample();
  EXPECT_FALSE(result.gross_reduction(result.modes[0]));
  EXPECT_FALSE(result.gross_reduction(result.modes[1]));
  EXPECT_DOUBLE_EQ(result.gross_reduction(result.modes[2]).value(), 40.0 / 50);
  EXPECT_DOUBLE_EQ(result.gross_reduction(mode("offload", 70, 50)).value(), 30.0 / 50);
  EXPECT_DOUBLE_EQ(result.net_reduction(result.modes[2]).value(), 1.0);
  EXPECT_FALSE(result.net_reduction(mode("offload", 70, 50, 50))) << "all of it was in flight";
}

TEST(TrainingResult, NoReductionWithoutAMeasuredCounterpart) {
  TrainingResult result = sample();
  result.modes.erase(result.modes.begin() + 1);
  EXPECT_FALSE(result.gross_reduction(result.modes.back()));
}

TEST(ResultTable, ShowsLossEntropyAndModes) {
  const std::string table = result_table(sample());
  EXPECT_NE(table.find("1,234 of 200 steps"), std::string::npos) << table;
  EXPECT_NE(table.find("0.7000 below"), std::string::npos) << table;
  EXPECT_NE(table.find("250.0 ms"), std::string::npos) << table;
  EXPECT_NE(table.find("130.0 MiB"), std::string::npos) << table;
  EXPECT_TRUE(has_row(table, "device memory saved", "40.0 MiB")) << table;
  EXPECT_TRUE(has_row(table, "of what was offloaded", "80%")) << table;
  EXPECT_EQ(table.find("100%"), std::string::npos) << "R (net) is for the JSON\n" << table;
  EXPECT_EQ(table.back(), '\n');
}

TEST(ResultTable, WhatTheFirstStepsDoNotMeasureIsNotShownAsZero) {
  TrainingResult result = sample();
  ModeResult& first = result.modes.back();
  first.steps = 0;
  first.step_seconds = 0;
  first.live = first.allocated = first.reserved = 0;
  first.first_reserved = 7 * kMebibyte;
  const std::string table = result_table(result);
  EXPECT_TRUE(has_row(table, "peak memory live", "-")) << table;
  EXPECT_TRUE(has_row(table, "peak memory reserved", "-")) << table;
  EXPECT_TRUE(has_row(table, "in the first steps", "7.0 MiB")) << table;
  EXPECT_TRUE(has_row(table, "device memory saved", "-")) << table;
  const auto json = nlohmann::json::parse(result_json(result))["modes"].back();
  for (const char* key : {"step_seconds_median", "peak_live_bytes", "peak_allocated_bytes", "peak_reserved_bytes"}) {
    EXPECT_TRUE(json.at(key).is_null()) << key << ' ' << json;
  }
  EXPECT_FALSE(json.contains("r_gross")) << json;
}

TEST(ResultTable, ATrainingThatWasEndedBeforeItsFirstStepHasNoLossAndNoTrace) {
  TrainingResult result = sample();
  result.steps_done = 0;
  EXPECT_THROWS(Error, "no step was traced", (void)result_trace(result));
  result.signal = SIGINT;
  const std::string table = result_table(result);
  EXPECT_TRUE(has_row(table, "train", "-")) << table;
  EXPECT_TRUE(has_row(table, "in the first steps", "-")) << table;
  const auto json = nlohmann::json::parse(result_json(result));
  EXPECT_TRUE(json["train_loss"]["first"].is_null() && json["train_loss"]["last"].is_null()) << json;
  EXPECT_TRUE(json["modes"].back()["peak_reserved_bytes_first_steps"].is_null()) << json;
  EXPECT_EQ(result_trace(result), "");
}

TEST(ResultTable, DifferingGradientsAreNamed) {
  const auto parameter = [](double gradient) {
    at::Tensor tensor = at::zeros({4}).requires_grad_();
    tensor.mutable_grad() = at::full({4}, gradient);
    return NamedTensors{{"blocks.1.qkv.weight", tensor}};
  };
  TrainingResult result = sample();
  result.comparison.emplace(at::kFloat, 100, /*exact=*/true);
  result.comparison->compare(parameter(1.0), parameter(1.5));
  const std::string table = result_table(result);
  EXPECT_EQ(table.find("bit for bit"), std::string::npos) << table;
  EXPECT_NE(table.find("blocks.1.qkv.weight"), std::string::npos) << table;
  EXPECT_NE(table.find("BEYOND"), std::string::npos) << table;
  EXPECT_FALSE(nlohmann::json::parse(result_json(result))["gradients"]["bit_equal"].get<bool>());
}

TEST(ResultTable, OffloadThatMovedNothingSaysWhy) {
  TrainingResult result = sample();
  EXPECT_EQ(result_table(result).find("nothing was offloaded"), std::string::npos);
  result.modes.back().offload.bytes_per_step = 0;
  result.modes.back().offload.notes = {"backward needs the last groups immediately"};
  const std::string table = result_table(result);
  EXPECT_NE(table.find("graphs+offload: nothing was offloaded\n    backward needs the last groups"), std::string::npos)
      << table;
}

TEST(ResultJson, KeepsWhatTheTableShows) {
  const auto json = nlohmann::json::parse(result_json(sample()));
  EXPECT_EQ(json["steps_done"], 1234);
  EXPECT_EQ(json["modes"].size(), 3u);
  EXPECT_EQ(json["modes"][2]["offloaded_bytes_per_step"], 50 * kMebibyte);
  EXPECT_DOUBLE_EQ(json["modes"][2]["r_gross"].get<double>(), 0.8);
  EXPECT_DOUBLE_EQ(json["modes"][2]["r_net"].get<double>(), 1.0);
  EXPECT_EQ(json["modes"][2]["peak_live_bytes"], 90 * kMebibyte);
  EXPECT_FALSE(json["modes"][1].contains("r_gross"));
  EXPECT_FALSE(json.contains("gradients"));
}

TEST(ResultJson, WhatTheCommandLeavesToTheLibraryIsNull) {
  const auto json = nlohmann::json::parse(result_json(sample()));
  for (const char* const option : {"side_streams", "lag_mib", "lookahead_mib", "device_budget_mib"}) {
    EXPECT_TRUE(json["options"].at(option).is_null()) << option << ' ' << json;
  }
}

}  // namespace
}  // namespace sidestream::cli
