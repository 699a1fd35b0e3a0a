#include "tools/cli/interrupt.h"

#include <csignal>
#include <cstdlib>
#include <set>
#include <string>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/cli/program.h"
#include "tests/cli/scratch_folder.h"

namespace sidestream::cli {
namespace {

class InterruptGuardTest : public testing::TestWithParam<int> {};

TEST_P(InterruptGuardTest, TheFirstSignalIsOnlyNoted) {
  const InterruptGuard guard;
  EXPECT_FALSE(guard.requested());
  std::raise(GetParam());
  EXPECT_TRUE(guard.requested());
  EXPECT_EQ(guard.signal(), GetParam());
}

TEST_P(InterruptGuardTest, ASignalThatWasIgnoredStaysIgnored) {
  const auto before = std::signal(GetParam(), SIG_IGN);
  {
    const InterruptGuard guard;
    std::raise(GetParam());
    EXPECT_FALSE(guard.requested());
  }
  EXPECT_EQ(std::signal(GetParam(), before), SIG_IGN);
}

TEST_P(InterruptGuardTest, AfterItTheNextEndsTheProcessAndLeavesNoUnfinishedFile) {
  const ScratchFolder folder;
  const auto partial = folder.write("report.partial", "half");
  for (const int second : {SIGINT, SIGTERM}) {
    EXPECT_EXIT(
        {
          const InterruptGuard guard;
          const RemovedBySignal removed(partial.c_str());
          std::raise(GetParam());
          std::raise(second);
          std::_Exit(0);
        },
        testing::KilledBySignal(second), "ends after this step");
    EXPECT_FALSE(std::filesystem::exists(partial));
  }
}

TEST_P(InterruptGuardTest, WithoutAGuardASignalEndsTheProcess) {
  EXPECT_EXIT(
      {
        { const InterruptGuard guard; }
        std::raise(GetParam());
        std::_Exit(0);
      },
      testing::KilledBySignal(GetParam()), "");
}

INSTANTIATE_TEST_SUITE_P(Signals, InterruptGuardTest, testing::Values(SIGINT, SIGTERM, SIGHUP),
                         [](const testing::TestParamInfo<int>& info) {
                           return std::string(info.param == SIGINT ? "CtrlC" : signal_words(info.param));
                         });

TEST(InterruptGuard, ANewGuardStartsUnasked) {
  {
    const InterruptGuard guard;
    std::raise(SIGINT);
  }
  const InterruptGuard guard;
  EXPECT_FALSE(guard.requested());
}

TEST(InterruptGuard, SeveralHangupsAreOne) {
  const InterruptGuard guard;
  std::raise(SIGHUP);
  std::raise(SIGHUP);
  EXPECT_EQ(guard.signal(), SIGHUP);
}

class SignalledProgram : public testing::TestWithParam<int> {};

TEST_P(SignalledProgram, EndsAfterTheStepWithTableReportAndJournal) {
  const ScratchFolder folder;
  Program program(
      tiny_training({"--steps", "100000", "--check-steps", "2", "--report", (folder.path() / "report").string(),
                     "--journal", (folder.path() / "journal").string()}));
  ASSERT_TRUE(program.wait_for("step   "));
  program.signal(GetParam());
  const ProgramResult result = program.finish();
  EXPECT_EQ(result.code, 128 + GetParam()) << result.signal << result.err;
  const std::string words = std::string("ended by ") + signal_words(GetParam());
  EXPECT_PRED_FORMAT2(testing::IsSubstring, words, result.out);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "ends after this step", result.err);
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    names.insert(entry.path().filename());
  }
  EXPECT_EQ(names, (std::set<std::string>{"journal", "report"}));
  const auto json = nlohmann::json::parse(ScratchFolder::read(folder.path() / "report"));
  EXPECT_TRUE(json["interrupted"].get<bool>());
  EXPECT_EQ(json["ended_by"], signal_words(GetParam()));
  EXPECT_GE(json["steps_done"].get<int>(), 1);
}

TEST_P(SignalledProgram, OfWhichNothingIsLeftWhenItIsEndedAtOnce) {
  const ScratchFolder folder;
  // A step that lasts for many seconds: the first signal cannot have ended the program when the second comes.
  Program program(
      {"train",   "--device", "sim",        "--layers", "8",      "--hidden", "512",
       "--heads", "8",        "--kv-heads", "8",        "--ffn",  "2048",     "--seq",
       "512",     "--batch",  "16",         "--steps",  "100000", "--report", (folder.path() / "report").string()});
  ASSERT_TRUE(program.wait_until_interrupts_are_caught());
  program.signal(GetParam());
  ASSERT_TRUE(program.wait_for_error("ends after this step"));
  program.signal(SIGTERM);
  const ProgramResult result = program.finish();
  EXPECT_EQ(result.signal, SIGTERM) << result.code << result.err;
  EXPECT_PRED_FORMAT2(testing::IsNotSubstring, "ended by", result.out);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

INSTANTIATE_TEST_SUITE_P(Signals, SignalledProgram, testing::Values(SIGINT, SIGTERM, SIGHUP),
                         [](const testing::TestParamInfo<int>& info) {
                           return std::string(info.param == SIGINT ? "CtrlC" : signal_words(info.param));
                         });

TEST(SignalledProgramAtItsStart, EndsWithTheTable) {
  Program program(tiny_training({"--layers", "2", "--steps", "100000"}));
  ASSERT_TRUE(program.wait_until_interrupts_are_caught());
  program.signal(SIGINT);  // before, in or after the sizing step, as it comes
  const ProgramResult result = program.finish();
  EXPECT_EQ(result.code, 130) << result.signal << result.err;
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "ended by Ctrl-C", result.out);
}

}  // namespace
}  // namespace sidestream::cli
