// The program and the files that it is given: texts to read, places to write.
#include <filesystem>

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <nlohmann/json.hpp>

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

TEST(ProgramFiles, UnwritableReportIsRefusedBeforeTraining) {
  const ScratchFolder folder;
  const ProgramResult result = run_program(tiny_training({"--report", (folder.path() / "absent" / "r.json").string()}));
  EXPECT_EQ(result.code, 2);
  EXPECT_EQ(result.out.find("step"), std::string::npos) << result.out;
}

}  // namespace
}  // namespace sidestream::cli
