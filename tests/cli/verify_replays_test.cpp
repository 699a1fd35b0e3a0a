#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/cli/program.h"

namespace sidestream::cli {
namespace {

TEST(VerifyReplays, TheTableAndTheReportSayHowManyReplaysWereCompared) {
  const auto [out, json] = trained({"--steps", "6", "--layers", "2", "--verify-replays", "2", "--compare"});
  EXPECT_PRED_FORMAT2(testing::IsSubstring,
                      "verified: 4 replays compared with eager runs, 4 of them with gradients: all equal bit for bit",
                      out);
  EXPECT_EQ(json["options"]["verify_replays"], 2);
  EXPECT_EQ(json["verified"]["forwards"], 4);
  EXPECT_EQ(json["verified"]["backwards"], 4);
  EXPECT_EQ(json["verified"]["tolerance"], 0.0);
  EXPECT_TRUE(json["gradients"]["bit_equal"].get<bool>());
}

TEST(VerifyReplays, TheEnvironmentAsksForTheChecksOfTheTrainedSteps) {
  const auto [out, json] = trained({"--steps", "6", "--layers", "2", "--compare"},
                                   "export SIDESTREAM_VERIFY_REPLAYS=2 SIDESTREAM_CHECK_STEPS=3");
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "verified: 4 replays compared", out);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "operations of the first 3 steps", out);
  EXPECT_EQ(json["options"]["verify_replays"], 2);
  EXPECT_EQ(json["options"]["check_steps"], 3);
}

TEST(VerifyReplays, WhatMakesNoSenseIsRefused) {
  expect_refusal({"train", "--verify-replays", "-1"}, 2, "--verify-replays is -1");
  expect_refusal({"train", "--verify-replays", "some"}, 2, "--verify-replays");
  expect_refusal({"train", "--verify-replays", "5", "--graphs", "off"}, 2, "nothing is replayed");
}

}  // namespace
}  // namespace sidestream::cli
