// The program where device memory or addresses are few. Below some 2.9 GB the loader itself does not bring LibTorch's CUDA libraries in:
// its own one line, exit code 127.
#include <algorithm>
#include <string>

#include <gtest/gtest.h>

#include "tests/cli/program.h"

namespace sidestream::cli {
namespace {

TEST(ProgramMemory, TheSimulatedDeviceHasWhatTheEnvironmentGivesIt) {
  expect_refusal(tiny_training({"--steps", "2"}), 1, "out of memory", "export SIDESTREAM_SIM_MEMORY=4000000");
  // Too little for a step of larger layers, and for nothing else: the line says what held it.
  const std::vector<std::string> large = tiny_training({"--steps", "2", "--batch", "512"});
  expect_refusal(large, 1, "the device ran out of memory in a step", "export SIDESTREAM_SIM_MEMORY=70000000");
  EXPECT_EQ(run_program(tiny_training({"--steps", "2"}), "export SIDESTREAM_SIM_MEMORY=4000000000").code, 0);
}

TEST(ProgramMemory, WhatIsNoNumberOfBytesIsRefusedWithTheRemedy) {
  for (const char* const text : {"256M", "-1", "0", "1e9"}) {
    expect_refusal(tiny_training({"--steps", "2"}), 2, "give the bytes that the sim device has",
                   std::string("export SIDESTREAM_SIM_MEMORY=") + text);
  }
}

TEST(ProgramMemory, TooLittleEndsWithOneLine) {
  if (kAddressSanitizer) {
    GTEST_SKIP() << "AddressSanitizer needs addresses without end";
  }
  bool told = false;
  for (int kilobytes = 1'000'000; kilobytes <= 8'000'000; kilobytes += 1'000'000) {
    const ProgramResult result =
        run_program(tiny_training({"--steps", "2"}), "ulimit -c 0; ulimit -v " + std::to_string(kilobytes));
    const std::string at = std::to_string(kilobytes) + " KB: " + std::to_string(result.signal) + result.err;
    EXPECT_EQ(result.signal, 0) << at;
    EXPECT_PRED_FORMAT2(testing::IsNotSubstring, "terminate called", result.err) << at;
    EXPECT_PRED_FORMAT2(testing::IsNotSubstring, "--device sim", result.err) << "it was asked for: " << at;
    if (result.code != 0) {
      EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << at;
    }
    told = told || (result.code == 1 && result.err.rfind("sidestream: ", 0) == 0);
  }
  EXPECT_TRUE(told) << "no limit was one that the program itself met";
}

}  // namespace
}  // namespace sidestream::cli
