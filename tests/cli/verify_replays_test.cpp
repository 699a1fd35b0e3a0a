#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/cli/program.h"
#include "tests/cli/scratch_folder.h"

namespace sidestream::cli {
namespace {

TEST(VerifyReplays, TheTableAndTheReportSayHowManyReplaysWereCompared) {
  const ScratchFolder folder;
  const std::string report = (folder.path() / "report.json").string();
  const ProgramResult result = run_program(
      tiny_training({"--steps", "6", "--layers", "2", "--verify-replays", "2", "--compare", "--report", report}));
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  EXPECT_NE(
      result.out.find("verified: 4 replays compared with eager runs, 4 of them with gradients: all equal bit for bit"),
      std::string::npos)
      << result.out;
  const auto json = nlohmann::json::parse(ScratchFolder::read(report));
  EXPECT_EQ(json["options"]["verify_replays"], 2);
  EXPECT_EQ(json["verified"]["forwards"], 4);
  EXPECT_EQ(json["verified"]["backwards"], 4);
  EXPECT_EQ(json["verified"]["tolerance"], 0.0);
  EXPECT_TRUE(json["gradients"]["bit_equal"].get<bool>());
}

TEST(VerifyReplays, WithoutItTheReportSaysNothingOfIt) {
  const ScratchFolder folder;
  const std::string report = (folder.path() / "report.json").string();
  const ProgramResult result = run_program(tiny_training({"--steps", "3", "--report", report}));
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  EXPECT_EQ(result.out.find("verified"), std::string::npos) << result.out;
  EXPECT_FALSE(nlohmann::json::parse(ScratchFolder::read(report)).contains("verified"));
}

TEST(VerifyReplays, WhatMakesNoSenseIsRefused) {
  expect_refusal({"train", "--verify-replays", "-1"}, 2, "--verify-replays is -1");
  expect_refusal({"train", "--verify-replays", "some"}, 2, "--verify-replays");
  expect_refusal({"train", "--verify-replays", "5", "--graphs", "off"}, 2, "nothing is replayed");
}

}  // namespace
}  // namespace sidestream::cli
