// sidestream train --device-budget-mib: what is offloaded follows from a budget of device memory.
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/cli/program.h"

namespace sidestream::cli {
namespace {

const std::vector<std::string> kTraining{"--steps", "8", "--layers", "8"};

TrainedProgram trained_with(const std::vector<std::string>& more) {
  std::vector<std::string> arguments = kTraining;
  arguments.insert(arguments.end(), more.begin(), more.end());
  return trained(std::move(arguments));
}

double peak(const nlohmann::json& report) { return report["modes"].back()["peak_live_bytes"].get<double>(); }

TEST(BudgetTraining, StepsStayWithinTheBudgetAndTheForecastIsPrinted) {
  constexpr double kMebibyte = 1 << 20;
  const double most = peak(trained_with({"--offload", "off"}).report);
  const double least = peak(trained_with({"--lag-mib", "1"}).report);
  const auto budget = static_cast<std::int64_t>((least + most) / 2 / kMebibyte);
  const TrainedProgram within = trained_with({"--device-budget-mib", std::to_string(budget)});
  const nlohmann::json& mode = within.report["modes"].back();
  EXPECT_LE(mode["peak_live_bytes"].get<double>(), static_cast<double>(budget) * kMebibyte);
  EXPECT_EQ(mode["peak_live_bytes"], mode["forecast_peak_live_bytes"]);
  EXPECT_GT(mode["offloaded_bytes_per_step"], 0);
  EXPECT_NE(within.out.find("plan: a step will take "), std::string::npos) << within.out;
  EXPECT_NE(within.out.find("    forecast "), std::string::npos) << within.out;
}

TEST(BudgetTraining, HasPlainGradientsBitForBit) {
  const nlohmann::json report = trained_with({"--device-budget-mib", "64", "--compare"}).report;
  EXPECT_TRUE(report["gradients"]["bit_equal"].get<bool>()) << report["gradients"];
}

TEST(BudgetTraining, WhatMakesNoSenseIsRefused) {
  expect_refusal({"train", "--device-budget-mib", "64", "--graphs", "off"}, 2, "--device-budget-mib with --graphs off");
  expect_refusal({"train", "--device-budget-mib", "64", "--graphs", "step"}, 2,
                 "--device-budget-mib with --graphs step");
  expect_refusal({"train", "--device-budget-mib", "64", "--offload", "off"}, 2,
                 "--device-budget-mib with --offload off");
  expect_refusal({"train", "--device-budget-mib", "64", "--lag-mib", "1"}, 2, "which its plan chooses");
  expect_refusal({"train", "--device", "sim", "--device-budget-mib", "1"}, 2,
                 "the model's weights and buffers alone take");
}

}  // namespace
}  // namespace sidestream::cli
