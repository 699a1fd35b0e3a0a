// sidestream train --model moe, and parts of a layer in graphs: the gradients are plain training's, the loss falls on real text.
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/cli/program.h"

namespace sidestream::cli {
namespace {

class MixtureTraining : public testing::TestWithParam<std::vector<std::string>> {};

TEST_P(MixtureTraining, HasPlainGradientsBitForBitInEachOrder) {
  for (const char* schedule : {"late", "d2h-late", "seed:3"}) {
    std::vector<std::string> arguments{"--compare", "--steps", "6", "--schedule", schedule, "--check-steps", "6"};
    arguments.insert(arguments.end(), GetParam().begin(), GetParam().end());
    const nlohmann::json json = trained(arguments).report;
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
  const nlohmann::json json = trained({"--model", "moe", "--steps", "60"}).report;
  EXPECT_EQ(json["options"]["model"], "moe");
  EXPECT_EQ(json["options"]["graphs"], "partial");
  EXPECT_LT(json["held_out_loss"]["last"].get<double>(), json["held_out_loss"]["first"].get<double>() - 1.0);
}

}  // namespace
}  // namespace sidestream::cli
