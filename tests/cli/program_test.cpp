#include "tests/cli/program.h"

#include <cstdlib>
#include <filesystem>
#include <optional>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "sidestream/journal.h"
#include "tests/cli/scratch_folder.h"

namespace sidestream::cli {
namespace {

TEST(Program, HelpAndVersionSucceed) {
  const ProgramResult help = run_program({"--help"});
  EXPECT_EQ(help.code, 0);
  EXPECT_NE(help.out.find("Examples:"), std::string::npos);
  const ProgramResult train_help = run_program({"train", "--help"});
  EXPECT_EQ(train_help.code, 0);
  EXPECT_NE(train_help.out.find("--side-streams"), std::string::npos);
  const ProgramResult order_help = run_program({"order", "--help"});
  EXPECT_EQ(order_help.code, 0);
  EXPECT_NE(order_help.out.find("--svg"), std::string::npos);
  EXPECT_EQ(order_help.out.find("sidestream train"), std::string::npos) << order_help.out;
  const ProgramResult version = run_program({"--version"});
  EXPECT_EQ(version.code, 0);
  EXPECT_EQ(version.out.rfind("sidestream ", 0), 0u);
}

TEST(Program, WrongUsageExitsWithTwo) {
  expect_refusal({}, 2, "subcommand");
  expect_refusal({"trian", "--steps", "3"}, 2, "'trian' is no command");
  expect_refusal({"train", "--colour"}, 2, "--colour");
  expect_refusal({"train", "--steps", "many"}, 2, "--steps");
  expect_refusal({"train", "--device", "abacus"}, 2, "--device");
  expect_refusal({"train", "--hidden", "98"}, 2, "96 or 100");
  expect_refusal({"train", "--side-streams", "0"}, 2, "--side-streams is 0");
  expect_refusal({"train", "--offload", "attention"}, 2, "core_attn");
  expect_refusal({"train", "--model", "mamba"}, 2, "dense,moe");
  expect_refusal({"train", "--graphs", "whole"}, 2, "--graphs");
  expect_refusal({"train", "--schedule", "never", "--device", "sim"}, 2, "d2h-early");
}

TEST(Program, PatternThatMatchesNoScopeListsTheNamesThereAre) {
  const ProgramResult result = run_program(tiny_training({"--steps", "2", "--offload", "blocks.*.router"}));
  EXPECT_EQ(result.code, 2) << result.err;
  EXPECT_NE(result.err.find("core_attn"), std::string::npos) << result.err;
}

/// Programs that are started while it lives see no NVIDIA GPU.
class HiddenGpus {
 public:
  HiddenGpus() : before_(environment("CUDA_VISIBLE_DEVICES")) { setenv("CUDA_VISIBLE_DEVICES", "", 1); }
  HiddenGpus(const HiddenGpus&) = delete;
  HiddenGpus& operator=(const HiddenGpus&) = delete;
  ~HiddenGpus() {
    if (before_) {
      setenv("CUDA_VISIBLE_DEVICES", before_->c_str(), 1);
    } else {
      unsetenv("CUDA_VISIBLE_DEVICES");
    }
  }

 private:
  static std::optional<std::string> environment(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  }
  std::optional<std::string> before_;
};

TEST(Program, CudaWithoutAUsableGpuNamesTheSimDevice) {
  const HiddenGpus hidden;
  // Without the backend it is the request that cannot be met, with it the machine.
  const char* backend = std::getenv("SIDESTREAM_CUDA_BACKEND");
  const bool absent = backend != nullptr && std::string(backend) == "absent";
  expect_refusal({"train", "--device", "cuda", "--steps", "1"}, absent ? 2 : 1, absent ? "cuda backend" : "driver");
  expect_refusal({"train", "--device", "cuda", "--steps", "1"}, absent ? 2 : 1, "--device sim");
}

TEST(Program, ComparedTrainingIsEqualAndReported) {
  const auto [out, json] = trained({"--steps", "5", "--compare"});
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "bit for bit", out);
  EXPECT_EQ(json["steps_done"], 5);
  EXPECT_FALSE(json["interrupted"].get<bool>());
  EXPECT_EQ(json["ended_by"], "");
  EXPECT_TRUE(json["gradients"]["bit_equal"].get<bool>());
  EXPECT_TRUE(json["gradients"]["trained_parameters_equal"].get<bool>());
  EXPECT_EQ(json["gradients"]["steps"], 5);
  EXPECT_EQ(json["gradients"]["parameters"].size(), 3u + 4 * 6);
  ASSERT_EQ(json["modes"].size(), 3u);
  EXPECT_EQ(json["modes"][0]["name"], "eager");
  EXPECT_EQ(json["modes"][1]["name"], "graphs");
  EXPECT_EQ(json["modes"][2]["name"], "graphs+offload");
  EXPECT_EQ(json["modes"][0]["offloaded_bytes_per_step"], 0);
  EXPECT_EQ(json["modes"][1]["graphs"], 8);
  EXPECT_GT(json["modes"][2]["offloaded_bytes_per_step"], 0);
  EXPECT_GT(json["modes"][2]["pinned_host_bytes"], 0);
}

TEST(Program, CheckedStepsAreOrderedAndTheirJournalIsReadBack) {
  const ScratchFolder folder;
  const std::string journal = (folder.path() / "steps.journal").string();
  const auto [out, json] = trained({"--steps", "6", "--check-steps", "5", "--journal", journal});
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "operations of the first 5 steps, all conflicting accesses are ordered",
                      out);
  EXPECT_GT(json["order"]["operations"].get<int>(), 1000);
  EXPECT_TRUE(json["order"]["findings"].empty());

  const ProgramResult again = run_program({"check", journal});
  EXPECT_EQ(again.code, 0) << again.out << again.err;
  EXPECT_EQ(again.out.rfind(std::to_string(json["order"]["operations"].get<int>()) + " operations", 0), 0U)
      << again.out;
}

TEST(Program, AFindingFailsTheCheck) {
  Journal journal;
  journal.names = {"", "mm", "copy"};
  journal.streams = {"main", "copies"};
  journal.accesses = {{0x1000, 64, true}, {0x1000, 64, false}};
  journal.operations = {{JournalKind::compute, 0, 0, 1, 0, 0, 1}, {JournalKind::copy_to_host, 1, 0, 2, 0, 1, 1}};
  const ScratchFolder folder;
  const std::string path = folder.write("racing.journal", journal_bytes(journal)).string();
  const ProgramResult result = run_program({"check", path});
  EXPECT_EQ(result.code, 1);
  EXPECT_NE(result.out.find("not ordered: mm on main writes"), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("fix: copies must wait"), std::string::npos) << result.out;
}

TEST(Program, JournalsThatAreNoneAreRefused) {
  const ScratchFolder folder;
  expect_refusal({"check"}, 2, "journal");
  expect_refusal({"check", (folder.path() / "absent").string()}, 2, "No such file");
  expect_refusal({"check", folder.write("text", "no journal at all, but long enough").string()}, 2, "is not a journal");
  expect_refusal({"check", folder.write("cut", journal_bytes(Journal()).substr(0, 30)).string()}, 2, "is truncated");
  std::string newer = journal_bytes(Journal());
  newer[19] = 99;
  expect_refusal({"check", folder.write("newer", newer).string()}, 2, "is of version 99");
  const auto large = folder.write("large", journal_bytes(Journal()));
  std::filesystem::resize_file(large, std::uintmax_t{1} << 42);  // sparse
  expect_refusal({"check", large.string()}, 2, "has 4398046511104 bytes");
  expect_refusal({"train", "--journal", "x"}, 2, "--check-steps");
  expect_refusal({"train", "--check-steps", "-1"}, 2, "--check-steps is -1");
  expect_refusal({"train", "--check-steps", "5", "--graphs", "off", "--offload", "off"}, 2, "nothing to order");
  expect_refusal(tiny_training({"--check-steps", "5", "--journal", (folder.path() / "absent" / "j").string()}), 2,
                 "--journal");
}

TEST(Program, EveryScheduleGivesTheSameBytes) {
  for (const std::vector<std::string>& placement :
       std::vector<std::vector<std::string>>{{"--graphs", "off"}, {"--side-streams", "1"}, {"--offload", "off"}}) {
    std::vector<std::string> arguments{"check", "--schedules", "60", "--layers", "3"};
    arguments.insert(arguments.end(), placement.begin(), placement.end());
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.code, 0) << result.out << result.err;
    EXPECT_NE(result.out.find("60 tried"), std::string::npos) << result.out;
    EXPECT_NE(result.out.find("all orders gave the same bytes"), std::string::npos) << result.out;
  }
}

TEST(Program, OneScheduleRunsAgain) {
  const ProgramResult result = run_program({"check", "--schedule", "seed:5", "--layers", "2", "--graphs", "off"});
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  EXPECT_NE(result.out.find("seed:5: the results have the same bytes"), std::string::npos) << result.out;
}

TEST(Program, SchedulesThatCannotBeRunAreRefused) {
  expect_refusal({"check", "--schedules", "0"}, 2, "it must be 1 or more");
  expect_refusal({"check", "--schedules", "-3"}, 2, "it must be 1 or more");
  expect_refusal({"check", "--schedules", "many"}, 2, "--schedules");
  expect_refusal({"check", "--schedule", "fastest"}, 2, "d2h-late, seed:N, starve:N or hold:N");
  expect_refusal({"check", "--schedule", "late", "--schedules", "5"}, 2, "give one of the two");
  expect_refusal({"check", "--schedules", "5", "steps.journal"}, 2, "give one of them");
  expect_refusal({"check", "--schedules", "5", "--graphs", "off", "--offload", "off"}, 2, "nothing to order");
  expect_refusal({"check", "--schedules", "5", "--steps", "0"}, 2, "--steps");
}

TEST(Program, EveryModeTrainsToTheSameLoss) {
  std::vector<std::string> losses;
  for (const std::vector<std::string>& mode :
       std::vector<std::vector<std::string>>{{"--graphs", "off", "--offload", "off"},
                                             {"--graphs", "off"},
                                             {"--offload", "off"},
                                             {"--side-streams", "1"},
                                             {"--schedule", "late"},
                                             {"--schedule", "seed:3", "--side-streams", "3"}}) {
    std::vector<std::string> arguments{"--steps", "4"};
    arguments.insert(arguments.end(), mode.begin(), mode.end());
    losses.push_back(trained(arguments).report["train_loss"].dump());
  }
  for (const std::string& loss : losses) {
    EXPECT_EQ(loss, losses.front());
  }
}

TEST(Program, WhatComesBeforeTheReplaysIsShown) {
  const ProgramResult result = run_program(tiny_training({"--steps", "2", "--compare"}));
  EXPECT_EQ(result.code, 0) << result.err;
  std::size_t at = 0;
  for (const char* line :
       {"train  making the model\nmodel: ", "train  step 1/2", "train  warming up blocks.0 (1 of 4)\n",
        "train  pinning ", "train  capturing blocks.0, forward (1 of 4)\n",
        "train  capturing blocks.3, backward (1 of 4)\n", "train  step 2/2", "measure graphs  warming up blocks.0",
        "measure graphs+offload  warming up blocks.0"}) {
    at = result.out.find(line, at);
    ASSERT_NE(at, std::string::npos) << line << "\n" << result.out;
  }
}

TEST(Program, LossFallsWithTraining) {
  const nlohmann::json json = trained({"--steps", "40"}).report;
  EXPECT_LT(json["held_out_loss"]["last"].get<double>(), json["held_out_loss"]["first"].get<double>() - 1);
}

TEST(Program, InfoShowsTheSimDeviceAndItsLink) {
  const ProgramResult result = run_program({"info"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_NE(result.out.find("LibTorch"), std::string::npos);
  EXPECT_NE(result.out.find("sim"), std::string::npos);
  EXPECT_NE(result.out.find("GB/s"), std::string::npos);
}

}  // namespace
}  // namespace sidestream::cli
