#include "tools/cli/interrupt.h"

#include <csignal>
#include <cstdlib>

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace sidestream::cli
