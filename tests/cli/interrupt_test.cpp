#include "tools/cli/interrupt.h"

#include <csignal>
#include <cstdlib>

#include <gtest/gtest.h>

#include "tests/cli/program.h"

namespace sidestream::cli {
namespace {

TEST(InterruptGuard, FirstSignalOnlySetsTheFlag) {
  const InterruptGuard guard;
  EXPECT_FALSE(guard.requested());
  std::raise(SIGINT);
  EXPECT_TRUE(guard.requested());
}

TEST(InterruptGuard, ANewGuardStartsUnasked) {
  {
    const InterruptGuard guard;
    std::raise(SIGINT);
  }
  const InterruptGuard guard;
  EXPECT_FALSE(guard.requested());
}

TEST(InterruptGuardDeathTest, SecondSignalEndsTheProcess) {
  EXPECT_EXIT(
      {
        const InterruptGuard guard;
        std::raise(SIGINT);
        std::raise(SIGINT);
        std::_Exit(0);
      },
      testing::KilledBySignal(SIGINT), "");
}

TEST(InterruptGuardDeathTest, WithoutAGuardASignalEndsTheProcess) {
  EXPECT_EXIT(
      {
        { const InterruptGuard guard; }
        std::raise(SIGINT);
        std::_Exit(0);
      },
      testing::KilledBySignal(SIGINT), "");
}

TEST(InterruptedProgram, TheFirstEndsItAfterTheStepWithTheTable) {
  Program program({"train", "--device", "sim", "--layers", "2", "--hidden", "32", "--heads", "2", "--kv-heads", "1",
                   "--ffn", "48", "--seq", "32", "--batch", "2", "--steps", "100000"});
  ASSERT_TRUE(program.wait_until_interrupts_are_caught(true));
  program.interrupt();  // before, in or after the sizing step, as it comes
  const ProgramResult result = program.finish();
  EXPECT_EQ(result.code, 130) << result.signal << result.err;
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "ended by Ctrl-C", result.out);
}

TEST(InterruptedProgram, TheSecondEndsItAtOnce) {
  // A step that lasts for many seconds: the first interrupt cannot have ended the program when the second comes.
  Program program({"train", "--device", "sim", "--layers", "8", "--hidden", "512", "--heads", "8", "--kv-heads", "8",
                   "--ffn", "2048", "--seq", "512", "--batch", "16", "--steps", "100000"});
  ASSERT_TRUE(program.wait_until_interrupts_are_caught(true));
  program.interrupt();
  ASSERT_TRUE(program.wait_until_interrupts_are_caught(false)) << "the first sets the default action back";
  program.interrupt();
  const ProgramResult result = program.finish();
  EXPECT_EQ(result.signal, SIGINT) << result.code << result.err;
  EXPECT_PRED_FORMAT2(testing::IsNotSubstring, "ended by Ctrl-C", result.out);
}

}  // namespace
}  // namespace sidestream::cli
