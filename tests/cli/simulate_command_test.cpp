// `sidestream simulate`: the table, the files, and what is refused.
#include <cstddef>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/cli/program.h"
#include "tests/cli/scratch_folder.h"

namespace sidestream::cli {
namespace {

/// Two layers of 10 and 20 ms that save 8 MiB, all offloadable. Copies take 16 and 4 ms; one layer's copy may trail.
const std::vector<std::string> kSmallStep{"--pp",
                                          "2",
                                          "--microbatches",
                                          "3",
                                          "--layers",
                                          "2",
                                          "--forward-ms",
                                          "10",
                                          "--backward-ms",
                                          "20",
                                          "--saved-mib",
                                          "8",
                                          "--offloadable-mib",
                                          "8",
                                          "--chunk-mib",
                                          "1",
                                          "--forward-more-mib",
                                          "0",
                                          "--backward-more-mib",
                                          "2",
                                          "--to-host-gbs",
                                          "0.524288",
                                          "--to-device-gbs",
                                          "2.097152",
                                          "--lag-mib",
                                          "8",
                                          "--lookahead-mib",
                                          "0"};

std::string simulated_output(const std::vector<std::string>& more) {
  std::vector<std::string> arguments{"simulate"};
  arguments.insert(arguments.end(), kSmallStep.begin(), kSmallStep.end());
  arguments.insert(arguments.end(), more.begin(), more.end());
  const ProgramResult result = run_program(arguments);
  EXPECT_EQ(result.code, 0) << result.err;
  return result.out;
}

TEST(SimulateCommand, ATableHasTheTimesAndThePeaksOfEachRank) {
  EXPECT_EQ(
      simulated_output({}),
      "1F1B: 2 ranks, 3 microbatches\n\n"
      "rank      step      busy    bubble   exposed  peak, no offload      peak  offloaded\n"
      "   0     264.0     180.0      60.0      24.0              36.0      28.0       40.0\n"
      "   1     264.0     180.0      66.0      18.0              19.0      19.0       24.0\n\n"
      "A step takes 264.0 ms, and 240.0 ms without offload. The largest peak is 28.0 MiB, and 36.0 MiB without "
      "offload.\n"
      "Times in ms, live memory in MiB above weights. Bubble: the rank waits for other ranks. Exposed: its layers "
      "wait for copies.\n");
}

TEST(SimulateCommand, ARankAloneWaitsForNoOther) {
  // Each of three microbatches waits 6 ms for the copy of its first layer. The second layer stays.
  const std::string out = simulated_output({"--alone", "1"});
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "1F1B: 2 ranks, 3 microbatches, rank 1 alone\n", out);
  EXPECT_PRED_FORMAT2(testing::IsSubstring,
                      "   1     198.0     180.0       0.0      18.0              19.0      19.0       24.0\n", out);
}

TEST(SimulateCommand, TheFiguresAreInAFile) {
  const ScratchFolder folder;
  const std::filesystem::path file = folder.path() / "step.json";
  (void)simulated_output({"--dw", "--json", file.string()});
  const auto json = nlohmann::json::parse(ScratchFolder::read(file));
  EXPECT_EQ(json["dw"], true);
  EXPECT_EQ(json["costs"]["weights_seconds"], 0.01) << "half of the backward";
  EXPECT_EQ(json["costs"]["for_weights_bytes"], 8 << 20) << "all that is saved";
  EXPECT_EQ(json["costs"]["lag"], 8 << 20);
  ASSERT_EQ(json["ranks"].size(), 2U);
  const auto& rank = json["ranks"][1];
  EXPECT_EQ(rank["rank"], 1);
  EXPECT_NEAR(
      rank["step_seconds"].get<double>(),
      rank["busy_seconds"].get<double>() + rank["idle_seconds"].get<double>() + rank["waited_seconds"].get<double>(),
      1e-9);
  EXPECT_GT(rank["peak_bytes"], 0);
}

TEST(SimulateCommand, ATraceHasEachStepAndCopyOnTheThreadOfItsRank) {
  const ScratchFolder folder;
  const std::filesystem::path file = folder.path() / "step.trace.json";
  (void)simulated_output({"--trace", file.string()});
  const auto trace = nlohmann::json::parse(ScratchFolder::read(file));
  std::map<std::string, int> names;
  std::map<std::pair<int, int>, double> ends;  // by rank and thread
  std::map<std::pair<int, int>, int> spans;
  std::map<int, double> memory;
  for (const auto& event : trace["traceEvents"]) {
    const int rank = event["pid"];
    if (event["ph"] == "M") {
      ++names[event["args"]["name"].get<std::string>()];
    } else if (event["ph"] == "C") {
      memory[rank] = event["args"]["MiB"];
    } else {
      ASSERT_EQ(event["ph"], "X");
      const std::pair<int, int> thread(rank, event["tid"]);
      const double begin = event["ts"];
      EXPECT_GE(begin, ends[thread] - 1e-6) << event;
      EXPECT_GT(event["dur"], 0) << event;
      ends[thread] = begin + event["dur"].get<double>();
      ++spans[thread];
    }
  }
  EXPECT_EQ(names,
            (std::map<std::string, int>{
                {"rank 0", 1}, {"rank 1", 1}, {"compute", 2}, {"copies to the host", 2}, {"copies to the device", 2}}));
  EXPECT_EQ(spans, (std::map<std::pair<int, int>, int>{
                       {{0, 1}, 6}, {{0, 2}, 5}, {{0, 3}, 5}, {{1, 1}, 6}, {{1, 2}, 3}, {{1, 3}, 3}}));
  EXPECT_EQ(memory, (std::map<int, double>{{0, 0}, {1, 0}}));
}

TEST(SimulateCommand, APictureHasTheWorkTheCopiesAndTheMemoryOfEachRank) {
  const ScratchFolder folder;
  const std::filesystem::path file = folder.path() / "step.svg";
  (void)simulated_output({"--svg", file.string()});
  const std::string svg = ScratchFolder::read(file);
  EXPECT_EQ(occurrences(svg, "<rect class=\"forward\""), 2U * 3 + 1) << "and the legend's";
  EXPECT_EQ(occurrences(svg, "<rect class=\"host\""), 5U + 3 + 1);
  EXPECT_EQ(occurrences(svg, "<rect class=\"device\""), 5U + 3 + 1);
  EXPECT_EQ(occurrences(svg, "<polyline"), 2U);
  const std::size_t begin = svg.find("<polyline");
  const std::string line = svg.substr(begin, svg.find("/>", begin) - begin);
  // Memory changes with the begin and the end of each of 12 graphs, and after each of three chunks.
  EXPECT_EQ(occurrences(line, ","), 1U + 2 * (2 * 12 + 3));
}

TEST(SimulateCommand, NumbersThatAreEmptyBeyondSixtyFourBitsOrNotDecimalAreRefused) {
  for (const char* option : {"--pp", "--group", "--forward-ms", "--weights-ms", "--offloadable-mib",
                             "--for-weights-mib", "--lag-mib", "--to-host-gbs", "--alone"}) {
    expect_refusal({"simulate", option, ""}, 2, std::string(option) + ": the value is empty; give a number");
  }
  for (const char* option : {"--pp", "--layers", "--alone"}) {
    for (const char* value : {"99999999999999999999", "-9223372036854775809"}) {
      expect_refusal({"simulate", std::string(option) + "=" + value}, 2,
                     std::string(option) + ": " + value + " is beyond 64 bits");
    }
    for (const char* value : {"010", "-08", "0x4"}) {
      expect_refusal({"simulate", std::string(option) + "=" + value}, 2,
                     std::string(option) + ": " + value + " begins with a zero");
    }
  }
}

TEST(SimulateCommand, RefusesWhatItCannotSimulate) {
  expect_refusal({"simulate", "--pp", "0"}, 2, "a pipeline has 0 ranks; it must be 1 to");
  expect_refusal({"simulate", "--group", "4"}, 2, "leave out --group, or use --vpp 2");
  expect_refusal({"simulate", "--alone", "4"}, 2, "rank 4 is not one of the pipeline's ranks, 0 to 3");
  expect_refusal({"simulate", "--saved-mib", "-1"}, 2, "--saved-mib: -1 is out of range; give 0 to");
  expect_refusal({"simulate", "--lag-mib", "nan"}, 2, "--lag-mib: nan is out of range; give 0 to");
  expect_refusal({"simulate", "--forward-ms", "-1"}, 2, "--forward-ms: -1 is out of range; give 0 to");
  expect_refusal({"train", "--device-budget-mib", "010"}, 2, "--device-budget-mib: 010 begins with a zero");
  expect_refusal({"simulate", "--forward-ms", "fast"}, 2, "--forward-ms");
  expect_refusal({"simulate", "--to-host-gbs", "0"}, 2, "--to-host-gbs: 0 is out of range; give 0.001 to");
  expect_refusal({"simulate", "--offloadable-mib", "2000"}, 2, "--offloadable-mib 2000 is more than --saved-mib 1313");
  expect_refusal({"simulate", "--dw", "--weights-ms", "20"}, 2, "--weights-ms 20 is more than --backward-ms 15.6");
  expect_refusal({"simulate", "--microbatches", "100000"}, 2, "use fewer microbatches");
  expect_refusal({"simulate", "--weights-ms", "3"}, 2, "only with delayed weight gradients: add --dw");
  expect_refusal({"simulate", "--for-weights-mib", "3"}, 2, "only with delayed weight gradients: add --dw");
  const ScratchFolder folder;
  const std::string file = (folder.path() / "a").string();
  expect_refusal({"simulate", "--json", file, "--trace", file}, 2, "--json and --trace are both '" + file + "'");
  expect_refusal({"simulate", "--trace", file, "--svg", (folder.path() / "." / "a").string()}, 2,
                 "--trace and --svg are both '" + file + "'; give each its own file");
  EXPECT_FALSE(std::filesystem::exists(file));
  for (const char* option : {"--json", "--trace", "--svg"}) {
    expect_refusal({"simulate", option, folder.path().string()}, 2, "is a folder");
  }
}

}  // namespace
}  // namespace sidestream::cli
