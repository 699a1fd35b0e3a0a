// The program and the files that it is given: texts to read, places to write.
#include <filesystem>
#include <map>
#include <string>

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <nlohmann/json.hpp>

#include "eventually.h"
#include "tests/cli/program.h"
#include "tests/cli/scratch_folder.h"

namespace sidestream::cli {
namespace {

TEST(ProgramFiles, TextsThatCannotBeTrainedOnAreRefused) {
  const ScratchFolder folder;
  expect_refusal({"train", "--text", (folder.path() / "absent").string()}, 2, "No such file");
  expect_refusal({"train", "--text", folder.write("empty", "").string()}, 2, "is empty");
  expect_refusal({"train", "--text", folder.write("short", "too short").string()}, 2, "9 bytes");
}

TEST(ProgramFiles, TextsThatNeedNotEndAreRefusedInLittleMemory) {
  const ScratchFolder folder;
  const auto pipe = folder.path() / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const auto large = folder.write("large", "text");
  std::filesystem::resize_file(large, std::uintmax_t{1} << 42);  // sparse
  // So much memory that the program starts, and no more than a text may have.
  const std::string limit = kAddressSanitizer ? "" : "ulimit -v 6000000";
  expect_refusal({"train", "--text", "/dev/zero"}, 2, "is a device or a pipe", limit);
  expect_refusal({"train", "--text", pipe.string()}, 2, "is a device or a pipe", limit);
  expect_refusal({"train", "--text", large.string()}, 2, "more than 1073741824 bytes", limit);
  expect_refusal({"check", "--schedules", "5", "--text", "/dev/zero"}, 2, "is a device or a pipe", limit);
}

TEST(ProgramFiles, UnwritableReportIsRefusedBeforeTraining) {
  const ScratchFolder folder;
  const ProgramResult result = run_program(tiny_training({"--report", (folder.path() / "absent" / "r.json").string()}));
  EXPECT_EQ(result.code, 2);
  EXPECT_EQ(result.out.find("step"), std::string::npos) << result.out;
}

TEST(ProgramFiles, ReportAndJournalNeedTwoFiles) {
  const ScratchFolder folder;
  const std::string same = (folder.path() / "same").string();
  const std::string again = (folder.path() / "." / "same").string();
  expect_refusal(tiny_training({"--report", same, "--journal", same, "--check-steps", "2"}), 2, "each its own file");
  expect_refusal(tiny_training({"--report", same, "--journal", again, "--check-steps", "2"}), 2, "each its own file");
}

TEST(ProgramFiles, ATextThatIsTrainedOnIsNotOverwritten) {
  const ScratchFolder folder;
  const std::string text = folder.write("text", std::string(1 << 16, 'a'));
  expect_refusal(tiny_training({"--text", text, "--report", text}), 2, "--text and --report are both");
  EXPECT_EQ(ScratchFolder::read(text), std::string(1 << 16, 'a'));
}

TEST(ProgramFiles, NamesThatAreEmptyAreRefused) {
  expect_refusal({"train", "--report", ""}, 2, "--report: the name is empty; give a name");
  expect_refusal({"train", "--dump-graphs", ""}, 2, "--dump-graphs: the name is empty");
  expect_refusal({"order", "--svg", ""}, 2, "--svg: the name is empty");
}

TEST(ProgramFiles, StandardOutputThatCannotBeWrittenIsAFailure) {
  for (const char* argument : {"order", "--help"}) {
    expect_refusal({argument}, 1, "standard output cannot be written", "exec > /dev/full");
  }
}

/// A file that the program opens does not get the number of the closed stream.
TEST(ProgramFiles, WithAClosedStandardOutputNothingIsPrintedIntoOtherFiles) {
  const ScratchFolder folder;
  const auto pipe = folder.path() / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const auto got = folder.path() / "got";
  const ProgramResult result = run_program(tiny_training({"--steps", "1", "--report", pipe.string()}),
                                           "cat " + pipe.string() + " > " + got.string() + " & exec >&-");
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_TRUE(testing_model::eventually([&] { return nlohmann::json::accept(ScratchFolder::read(got)); }))
      << ScratchFolder::read(got);
}

TEST(ProgramFiles, AFullDiskEndsTheRunWithItsTableAndTheOtherFile) {
  const ScratchFolder folder;
  const auto report = folder.path() / "report.json";
  // The report has a few KB, the journal of a checked step far more.
  const ProgramResult result =
      run_program(tiny_training({"--steps", "3", "--check-steps", "3", "--report", report.string(), "--journal",
                                 (folder.path() / "journal").string()}),
                  "ulimit -f 40");
  EXPECT_EQ(result.code, 1) << result.signal << result.err;
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "3 of 3 steps", result.out);
  EXPECT_EQ(result.err.rfind("sidestream: --journal '", 0), 0U) << result.err;
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "cannot be written: File too large\n", result.err);
  EXPECT_EQ(nlohmann::json::parse(ScratchFolder::read(report))["steps_done"], 3);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1) << "nothing half written is left";
}

TEST(ProgramFiles, ATraceHasTheStepOfEachMode) {
  const ScratchFolder folder;
  const std::string path = (folder.path() / "trace.json").string();
  const ProgramResult result = run_program(tiny_training({"--steps", "4", "--compare", "--trace", path}));
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "trace: " + path, result.out);
  std::map<int, std::string> modes;
  std::map<int, int> copies;
  const nlohmann::json trace = nlohmann::json::parse(ScratchFolder::read(path));
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("name") == "process_name") {
      modes[event.at("pid")] = event.at("args").at("name");
    }
    copies[event.at("pid")] += event.at("ph") == "X" && event.at("args").contains("bytes") ? 1 : 0;
  }
  EXPECT_EQ(modes, (std::map<int, std::string>{{1, "graphs, step 3, as the host queued it"},
                                               {2, "graphs+offload, step 3, as the host queued it"}}));
  EXPECT_EQ(copies[1], 0);
  EXPECT_GT(copies[2], 0);
}

TEST(ProgramFiles, ATrainingThatIsTooShortForATraceLosesNoReport) {
  const ScratchFolder folder;
  const std::string report = (folder.path() / "report.json").string();
  const std::string trace = (folder.path() / "trace.json").string();
  const ProgramResult result = run_program(tiny_training({"--steps", "2", "--trace", trace, "--report", report}));
  EXPECT_EQ(result.code, 1);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "no step was traced", result.err);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "report: " + report, result.out);
  EXPECT_EQ(nlohmann::json::parse(ScratchFolder::read(report))["steps_done"], 2);
  EXPECT_FALSE(std::filesystem::exists(trace));
}

TEST(ProgramFiles, ATraceOfNothingIsRefused) {
  const ScratchFolder folder;
  const std::string trace = (folder.path() / "trace.json").string();
  expect_refusal(tiny_training({"--graphs", "off", "--offload", "off", "--trace", trace}), 2, "nothing to show");
  expect_refusal(tiny_training({"--graphs", "step", "--trace", trace}), 2, "one for the whole step");
  expect_refusal(tiny_training({"--report", trace, "--trace", trace}), 2, "each its own file");
}

TEST(ProgramFiles, EachGraphIsDrawnIntoTheFolderThatIsNamed) {
  const ScratchFolder folder;
  const ProgramResult result =
      run_program(tiny_training({"--steps", "2", "--layers", "1", "--dump-graphs", folder.path().string()}));
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "2 graphs were drawn into " + folder.path().string(), result.out);
  for (const char* name : {"0_0_blocks.0_forward.dot", "0_0_blocks.0_backward.dot"}) {
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "graphed call blocks.0", ScratchFolder::read(folder.path() / name));
  }
}

TEST(ProgramFiles, DrawingsThatCannotBeWrittenLoseNoReport) {
  const ScratchFolder folder;
  std::filesystem::create_directory(folder.path() / "0_0_blocks.0_forward.dot");
  const std::string report = (folder.path() / "report.json").string();
  const ProgramResult result = run_program(
      tiny_training({"--steps", "2", "--layers", "1", "--dump-graphs", folder.path().string(), "--report", report}));
  EXPECT_NE(result.code, 0);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "the drawing of a graph cannot be written", result.err);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "2 of 2 steps", result.out);
  EXPECT_EQ(nlohmann::json::parse(ScratchFolder::read(report))["steps_done"], 2);
}

TEST(ProgramFiles, DrawingsThatCannotBeAreRefusedBeforeTraining) {
  const ScratchFolder folder;
  const std::string below_a_file = (folder.write("file", "") / "graphs").string();
  expect_refusal(tiny_training({"--dump-graphs", below_a_file}), 2, "for drawings of graphs cannot be made");
  expect_refusal(tiny_training({"--graphs", "off", "--dump-graphs", folder.path().string()}), 2,
                 "--graphs off captures none");
}

TEST(ProgramFiles, AReportGoesIntoThePipeThatIsNamed) {
  const ScratchFolder folder;
  const ProgramResult result = run_program(tiny_training({"--steps", "2", "--report", "/dev/stdout"}));
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "\"steps_done\": 2", result.out);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "2 of 2 steps", result.out);
}

}  // namespace
}  // namespace sidestream::cli
