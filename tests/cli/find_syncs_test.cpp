#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/cli/program.h"
#include "tests/cli/scratch_folder.h"

namespace sidestream::cli {
namespace {

TEST(FindSyncs, TheDenseDemoNeverMakesTheHostWaitInAStep) {
  for (const std::vector<std::string>& placement :
       std::vector<std::vector<std::string>>{{}, {"--graphs", "off"}, {"--offload", "off"}, {"--dtype", "bfloat16"}}) {
    const ScratchFolder folder;
    const std::string report = (folder.path() / "report.json").string();
    std::vector<std::string> arguments{"--steps", "12", "--layers", "2", "--find-syncs", "--report", report};
    arguments.insert(arguments.end(), placement.begin(), placement.end());
    const ProgramResult result = run_program(tiny_training(arguments));
    EXPECT_EQ(result.code, 0) << result.out << result.err;
    EXPECT_NE(result.out.find("syncs: nothing made the host wait in a step"), std::string::npos) << result.out;
    const auto json = nlohmann::json::parse(ScratchFolder::read(report));
    EXPECT_TRUE(json["options"]["find_syncs"].get<bool>());
    EXPECT_EQ(json["syncs"]["found"], 0) << json["syncs"].dump(1);
    EXPECT_TRUE(json["syncs"]["places"].empty());
  }
}

TEST(FindSyncs, WithoutItTheReportSaysNothingOfIt) {
  const ScratchFolder folder;
  const std::string report = (folder.path() / "report.json").string();
  const ProgramResult result = run_program(tiny_training({"--steps", "3", "--report", report}));
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  EXPECT_EQ(result.out.find("syncs"), std::string::npos) << result.out;
  EXPECT_FALSE(nlohmann::json::parse(ScratchFolder::read(report)).contains("syncs"));
}

TEST(FindSyncs, TheEnvironmentAsksForItToo) {
  const ScratchFolder folder;
  const std::string report = (folder.path() / "report.json").string();
  const std::vector<std::string> training = tiny_training({"--steps", "3", "--layers", "1", "--report", report});
  ProgramResult result = run_program(training, "export SIDESTREAM_FIND_SYNCS=1");
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  EXPECT_NE(result.out.find("syncs: nothing made the host wait in a step"), std::string::npos) << result.out;
  const auto json = nlohmann::json::parse(ScratchFolder::read(report));
  EXPECT_TRUE(json["options"]["find_syncs"].get<bool>());
  EXPECT_EQ(json["syncs"]["found"], 0) << json.dump(1);
  result = run_program(training, "export SIDESTREAM_FIND_SYNCS=0");
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  EXPECT_EQ(result.out.find("syncs"), std::string::npos) << result.out;
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
