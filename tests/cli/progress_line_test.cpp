#include "tools/cli/progress_line.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

namespace sidestream::cli {
namespace {

std::string plain_text(std::size_t steps, const std::function<void(ProgressLine&)>& show) {
  std::FILE* file = std::tmpfile();
  {
    ProgressLine progress(file, "train", steps, 100);
    show(progress);
  }
  std::string text(static_cast<std::size_t>(std::ftell(file)), '\0');
  std::rewind(file);
  EXPECT_EQ(std::fread(text.data(), 1, text.size(), file), text.size());
  std::fclose(file);
  return text;
}

std::string plain_output(std::size_t steps) {
  return plain_text(steps, [&](ProgressLine& progress) {
    for (std::size_t i = 1; i <= steps; ++i) {
      progress.step(i, 1.25);
    }
  });
}

/// What a terminal is sent; nothing where this machine has no pseudo-terminals (a chroot without /dev/pts).
std::optional<std::string> terminal_output(const std::function<void(ProgressLine&)>& show) {
  const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
  if (terminal < 0 || grantpt(terminal) != 0) {
    return std::nullopt;
  }
  EXPECT_EQ(unlockpt(terminal), 0);
  std::FILE* file = std::fopen(ptsname(terminal), "w");
  {
    ProgressLine progress(file, "train", 10, 100);
    show(progress);
  }
  std::fclose(file);
  std::string text;
  char buffer[512];
  for (ssize_t count = 0; (count = read(terminal, buffer, sizeof buffer)) > 0;) {  // an error is the end
    text.append(buffer, static_cast<std::size_t>(count));
  }
  close(terminal);
  return text;
}

TEST(ProgressLine, PhasesAreOverwrittenOnATerminal) {
  const std::optional<std::string> output = terminal_output([](ProgressLine& progress) {
    progress.phase("making the model");
    progress.note("model: large");
    progress.phase({ProgressPhase::warm_up, 0, 2, "blocks.0"});
    progress.phase({ProgressPhase::warm_up, 1, 2, "blocks.1"});  // within a tenth of a second
    progress.phase({ProgressPhase::pin, 0, 1, {}, 3 << 20});
    progress.step(1, 1.25);
  });
  if (!output) {
    GTEST_SKIP() << "there are no pseudo-terminals here (is /dev/pts mounted?)";
  }
  const std::string& text = *output;
  EXPECT_EQ(text.rfind("\rtrain  making the model\x1b[K"
                       "\r\x1b[Kmodel: large\r\n"
                       "\rtrain  warming up blocks.0 (1 of 2)\x1b[K"
                       "\rtrain  pinning 3.0 MiB of host memory\x1b[K",
                       0),
            0U)
      << text;
  EXPECT_PRED_FORMAT2(testing::IsNotSubstring, "blocks.1", text);
}

TEST(ProgressLine, PhasesElsewhereHaveALineEach) {
  const std::string text = plain_text(10, [](ProgressLine& progress) {
    progress.phase("making the model");
    progress.note("model: large");
    for (std::size_t i = 0; i < 48; ++i) {
      progress.phase({ProgressPhase::warm_up, i, 48, "blocks." + std::to_string(i)});
    }
    for (std::size_t i = 0; i < 48; ++i) {
      progress.phase({ProgressPhase::capture_forward, i, 48, "blocks." + std::to_string(i)});
    }
    progress.phase({ProgressPhase::capture_backward, 0, 48, "blocks.47"});
  });
  EXPECT_EQ(text,
            "train  making the model\n"
            "model: large\n"
            "train  warming up blocks.0 (1 of 48)\n"
            "train  capturing blocks.0, forward (1 of 48)\n"
            "train  capturing blocks.47, backward (1 of 48)\n");
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
