#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/cli/program.h"

namespace sidestream::cli {
namespace {

TEST(FindSyncs, TheDenseDemoNeverMakesTheHostWaitInAStep) {
  for (const std::vector<std::string>& placement :
       std::vector<std::vector<std::string>>{{}, {"--graphs", "off"}, {"--offload", "off"}, {"--dtype", "bfloat16"}}) {
    std::vector<std::string> arguments{"--steps", "12", "--layers", "2", "--find-syncs"};
    arguments.insert(arguments.end(), placement.begin(), placement.end());
    const auto [out, json] = trained(arguments);
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "syncs: nothing made the host wait in a step", out);
    EXPECT_TRUE(json["options"]["find_syncs"].get<bool>());
    EXPECT_EQ(json["syncs"]["found"], 0) << json["syncs"].dump(1);
    EXPECT_TRUE(json["syncs"]["places"].empty());
  }
}

TEST(FindSyncs, WithoutItAndVerifiedReplaysTheReportSaysNothingOfThem) {
  const auto [out, json] = trained({"--steps", "3"});
  EXPECT_PRED_FORMAT2(testing::IsNotSubstring, "syncs", out);
  EXPECT_FALSE(json.contains("syncs"));
  EXPECT_PRED_FORMAT2(testing::IsNotSubstring, "verified", out);
  EXPECT_FALSE(json.contains("verified"));
}

TEST(FindSyncs, TheEnvironmentAsksForItToo) {
  const std::vector<std::string> training{"--steps", "3", "--layers", "1"};
  const auto [out, json] = trained(training, "export SIDESTREAM_FIND_SYNCS=1");
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "syncs: nothing made the host wait in a step", out);
  EXPECT_TRUE(json["options"]["find_syncs"].get<bool>());
  EXPECT_EQ(json["syncs"]["found"], 0) << json.dump(1);
  EXPECT_PRED_FORMAT2(testing::IsNotSubstring, "syncs", trained(training, "export SIDESTREAM_FIND_SYNCS=0").out);
}

TEST(FindSyncs, WhatMakesNoSenseIsRefused) {
  const std::string asked = "export SIDESTREAM_FIND_SYNCS=1";
  const std::vector<std::string> no_engine{"train", "--graphs", "off", "--offload", "off"};
  expect_refusal({"train", "--find-syncs", "--graphs", "off", "--offload", "off"}, 2, "there is no engine");
  expect_refusal(no_engine, 2, "SIDESTREAM_FIND_SYNCS=1) needs graphs or offload", asked);
  expect_refusal({"train", "--find-syncs", "--compare"}, 2, "which reads each gradient on the host");
  expect_refusal({"train", "--compare"}, 2, "SIDESTREAM_FIND_SYNCS=1) cannot be used with --compare", asked);
}

}  // namespace
}  // namespace sidestream::cli
