#include "tools/cli/progress_line.h"

#include <algorithm>
#include <cstdio>
#include <string>

#include <gtest/gtest.h>

namespace sidestream::cli {
namespace {

std::string plain_output(std::size_t steps) {
  std::FILE* file = std::tmpfile();
  {
    ProgressLine progress(file, "train", steps, 100);
    for (std::size_t i = 1; i <= steps; ++i) {
      progress.step(i, 1.25);
    }
  }
  std::string text(static_cast<std::size_t>(std::ftell(file)), '\0');
  std::rewind(file);
  EXPECT_EQ(std::fread(text.data(), 1, text.size(), file), text.size());
  std::fclose(file);
  return text;
}

TEST(ProgressLine, PlainLinesWhereThereIsNoTerminal) {
  const std::string text = plain_output(200);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 11) << text;
  EXPECT_EQ(text.find('\r'), std::string::npos);
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
  EXPECT_EQ(text.rfind("train  step   1/200  loss 1.2500  ", 0), 0u) << text;
  EXPECT_NE(text.find("step 200/200"), std::string::npos) << text;
  EXPECT_NE(text.find("tokens/s"), std::string::npos) << text;
}

TEST(ProgressLine, ShortRunsShowTheirFirstAndLastStep) {
  const std::string text = plain_output(3);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2) << text;
  EXPECT_NE(text.find("step 3/3"), std::string::npos) << text;
}

TEST(ProgressLine, DurationsInWords) {
  EXPECT_EQ(duration_words(-1), "0.0 s");
  EXPECT_EQ(duration_words(0.44), "0.4 s");
  EXPECT_EQ(duration_words(12.2), "12 s");
  EXPECT_EQ(duration_words(59.6), "1 min 00 s");
  EXPECT_EQ(duration_words(190), "3 min 10 s");
  EXPECT_EQ(duration_words(3720), "1 h 02 min");
}

}  // namespace
}  // namespace sidestream::cli
