// sidestream train --model moe, and parts of a layer in graphs: the gradients are plain training's, the loss falls on real text.
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/cli/program.h"
#include "tests/cli/scratch_folder.h"

namespace sidestream::cli {
namespace {

/// The report of a run with --compare that ended well.
nlohmann::json compared(std::vector<std::string> more) {
  const ScratchFolder folder;
  const auto report = folder.path() / "report.json";
  more.insert(more.end(), {"--compare", "--report", report.string()});
  const ProgramResult result = run_program(tiny_training(more));
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  return result.code == 0 ? nlohmann::json::parse(ScratchFolder::read(report)) : nlohmann::json();
}

class MixtureTraining : public testing::TestWithParam<std::vector<std::string>> {};

TEST_P(MixtureTraining, HasPlainGradientsBitForBitInEachOrder) {
  for (const char* schedule : {"late", "d2h-late", "seed:3"}) {
    std::vector<std::string> arguments{"--steps", "6", "--schedule", schedule, "--check-steps", "6"};
    arguments.insert(arguments.end(), GetParam().begin(), GetParam().end());
    const nlohmann::json json = compared(arguments);
    ASSERT_FALSE(json.is_null());
    EXPECT_TRUE(json["gradients"]["bit_equal"].get<bool>()) << json["gradients"];
    const nlohmann::json& last = json["modes"].back();
    EXPECT_EQ(last["name"], "graphs+offload");
    EXPECT_GT(last["graphs"], 0);
    EXPECT_GT(last["offloaded_bytes_per_step"], 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, MixtureTraining,
                         testing::Values(std::vector<std::string>{"--model", "moe"},
                                         std::vector<std::string>{"--model", "moe", "--delay", "off"},
                                         std::vector<std::string>{"--model", "moe", "--experts", "6", "--top-k", "3"},
                                         std::vector<std::string>{"--model", "moe", "--capacity", "1"},
                                         std::vector<std::string>{"--model", "moe", "--capacity", "1.25", "--graphs",
                                                                  "layer"},
                                         std::vector<std::string>{"--graphs", "partial"}));

TEST(MixtureTraining, LearnsTheText) {
  const ScratchFolder folder;
  const auto report = folder.path() / "report.json";
  const ProgramResult result =
      run_program(tiny_training({"--model", "moe", "--steps", "60", "--report", report.string()}));
  ASSERT_EQ(result.code, 0) << result.out << result.err;
  const auto json = nlohmann::json::parse(ScratchFolder::read(report));
  EXPECT_EQ(json["options"]["model"], "moe");
  EXPECT_EQ(json["options"]["graphs"], "partial");
  EXPECT_LT(json["held_out_loss"]["last"].get<double>(), json["held_out_loss"]["first"].get<double>() - 1.0);
}

}  // namespace
}  // namespace sidestream::cli
