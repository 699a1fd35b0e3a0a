// sidestream train --graphs step: one graph of forward, backward and update trains as plain steps do.
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/cli/program.h"
#include "tests/cli/scratch_folder.h"

namespace sidestream::cli {
namespace {

constexpr std::int64_t kStepsToTheFullRate = 20;  // at each of them the learning rate is another

/// The report of a run that ended well.
nlohmann::json trained_in_whole_steps(std::vector<std::string> more) {
  more.insert(more.end(), {"--graphs", "step"});
  return trained(std::move(more)).report;
}

class StepTraining : public testing::TestWithParam<std::vector<std::string>> {};

TEST_P(StepTraining, HasPlainGradientsAndWeightsBitForBitInEachOrder) {
  for (const char* schedule : {"d2h-late", "seed:3"}) {
    std::vector<std::string> arguments{"--compare", "--steps", "6", "--schedule", schedule, "--check-steps", "6"};
    arguments.insert(arguments.end(), GetParam().begin(), GetParam().end());
    const nlohmann::json json = trained_in_whole_steps(arguments);
    EXPECT_TRUE(json["gradients"]["bit_equal"].get<bool>()) << json["gradients"];
    EXPECT_TRUE(json["gradients"]["trained_parameters_equal"].get<bool>());
    EXPECT_GT(json["order"]["operations"], 0);
    EXPECT_EQ(json["modes"].size(), 3U);
    EXPECT_EQ(json["modes"][1]["name"], "graphs");
    EXPECT_EQ(json["modes"][1]["offloaded_bytes_per_step"], 0);
    const nlohmann::json& last = json["modes"].back();
    EXPECT_EQ(last["name"], "graphs+offload");
    EXPECT_GT(last["offloaded_bytes_per_step"], 0);
    EXPECT_GT(last["pinned_host_bytes"], 0);
    EXPECT_LT(last["peak_live_bytes"], json["modes"][1]["peak_live_bytes"]);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Forms, StepTraining,
    testing::Values(std::vector<std::string>{}, std::vector<std::string>{"--offload", "qkv,fc1,act"},
                    std::vector<std::string>{"--batch", "6", "--microbatches", "3"},
                    std::vector<std::string>{"--batch", "4", "--microbatches", "2", "--lag-mib", "1"},
                    std::vector<std::string>{"--model", "moe", "--capacity", "1.25"},
                    std::vector<std::string>{"--model", "moe", "--capacity", "1", "--batch", "4", "--microbatches",
                                             "2"}));

TEST(StepTraining, TheRateChangesWithoutANewCapture) {
  const auto steps = std::to_string(kStepsToTheFullRate + 4);
  const nlohmann::json json = trained_in_whole_steps({"--compare", "--steps", steps, "--offload", "off"});
  EXPECT_TRUE(json["gradients"]["bit_equal"].get<bool>()) << json["gradients"];
  EXPECT_TRUE(json["gradients"]["trained_parameters_equal"].get<bool>());
  const nlohmann::json once = trained_in_whole_steps({"--steps", "1", "--offload", "off"});
  EXPECT_GT(once["modes"][0]["graphs"], 0);
  EXPECT_EQ(json["modes"].back()["graphs"], once["modes"][0]["graphs"]);
}

TEST(StepTraining, LearnsTheText) {
  const nlohmann::json json = trained_in_whole_steps({"--steps", "40"});
  EXPECT_EQ(json["options"]["graphs"], "step");
  EXPECT_LT(json["held_out_loss"]["last"].get<double>(), json["held_out_loss"]["first"].get<double>() - 1.0);
}

TEST(StepTraining, EachReplayIsVerified) {
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "verified: 4 replays compared with eager runs",
                      trained({"--graphs", "step", "--steps", "6", "--verify-replays", "4"}).out);
}

TEST(StepTraining, NothingMakesTheHostWait) {
  const nlohmann::json json = trained_in_whole_steps({"--steps", "12", "--find-syncs"});
  EXPECT_EQ(json["syncs"]["found"], 0) << json["syncs"].dump(1);
}

TEST(StepTraining, TheGraphIsDrawn) {
  const ScratchFolder folder;
  const auto drawings = folder.path() / "graphs";
  (void)trained_in_whole_steps({"--steps", "2", "--dump-graphs", drawings.string()});
  EXPECT_FALSE(std::filesystem::is_empty(drawings));
}

TEST(StepTraining, EveryOrderGivesTheSameBytes) {
  const ProgramResult result =
      run_program({"check", "--schedules", "60", "--layers", "3", "--graphs", "step", "--microbatches", "2"});
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  EXPECT_NE(result.out.find("60 tried"), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("all orders gave the same bytes"), std::string::npos) << result.out;
}

TEST(StepTraining, WhatMakesNoSenseIsRefused) {
  expect_refusal({"train", "--graphs", "step", "--model", "moe"}, 2, "--capacity 1.25");
  expect_refusal({"train", "--graphs", "step", "--delay", "on"}, 2, "--delay on with --graphs step");
  expect_refusal({"train", "--graphs", "step", "--lookahead-mib", "4"}, 2,
                 "--lookahead-mib has no effect with --graphs step");
  expect_refusal({"train", "--batch", "6", "--microbatches", "4"}, 2, "--batch 6 is not divisible by --microbatches 4");
  expect_refusal({"train", "--microbatches", "0"}, 2, "--microbatches is 0; it must be from 1 to 6");
  expect_refusal({"train", "--pp", ""}, 2, "--pp: the value is empty");
  expect_refusal({"train", "--check-steps", "99999999999999999999"}, 2,
                 "--check-steps: 99999999999999999999 is beyond");
  expect_refusal({"train", "--seed", "18446744073709551616"}, 2, "--seed: 18446744073709551616 is beyond 64 bits");
}

/// Microbatches of graphed layers and of eager steps.
TEST(Microbatches, AddUpAsInPlainTraining) {
  for (const char* graphs : {"layer", "partial", "off"}) {
    const nlohmann::json json =
        trained({"--graphs", graphs, "--batch", "6", "--microbatches", "3", "--steps", "5", "--compare"}).report;
    EXPECT_TRUE(json["gradients"]["bit_equal"].get<bool>()) << json["gradients"];
    EXPECT_EQ(json["options"]["microbatches"], 3);
  }
}

TEST(Microbatches, AStepsLossIsTheMeanOverAllOfItsWindows) {
  const auto losses = [](const char* microbatches) {
    return trained_in_whole_steps(
        {"--batch", "6", "--microbatches", microbatches, "--steps", "3", "--offload", "off"})["train_loss"];
  };
  const nlohmann::json at_once = losses("1");
  const nlohmann::json in_parts = losses("3");
  for (const char* step : {"first", "last"}) {
    EXPECT_NEAR(at_once[step].get<double>(), in_parts[step].get<double>(), 1e-4);
  }
}

}  // namespace
}  // namespace sidestream::cli
