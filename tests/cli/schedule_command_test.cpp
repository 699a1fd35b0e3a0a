#include "tools/cli/schedule_command.h"

#include <gtest/gtest.h>

namespace sidestream::cli {
namespace {

TEST(ScheduleCommand, ADivergenceSaysWhatDiffersWhyAndHowToSeeItAgain) {
  Divergence divergence;
  divergence.schedule = Schedule(Schedule::Kind::seed, 77);
  divergence.bytes = 1234;
  divergence.result = "blocks.0.fc1.weight.grad of recorded step 2";
  divergence.pair = "copy_to_device on stream 2 writes, and mm on stream 0 reads them; fix: stream 0 waits";
  const std::string words = divergence_words(divergence);
  EXPECT_NE(words.find("seed:77: 1234 bytes differ"), std::string::npos) << words;
  EXPECT_NE(words.find(divergence.result), std::string::npos) << words;
  EXPECT_NE(words.find(divergence.pair), std::string::npos) << words;
  EXPECT_NE(words.find("--schedule seed:77"), std::string::npos) << words;
}

TEST(ScheduleCommand, AnOperatorThatFailsIsShownInOneLine) {
  Divergence divergence;
  divergence.error = "index out of range\nmore";
  const std::string words = divergence_words(divergence);
  EXPECT_NE(words.find("an operator fails: index out of range\n"), std::string::npos) << words;
  EXPECT_EQ(words.find("more"), std::string::npos) << words;
}

TEST(ScheduleCommand, ASummaryCountsWhatWasTried) {
  ScheduleSearch found;
  found.named = 4;
  found.starved = 3;
  found.held = 20;
  found.seeds = 73;
  found.orders = 61;
  EXPECT_NE(search_summary(found).find("100 tried"), std::string::npos);
  EXPECT_NE(search_summary(found).find("61 different"), std::string::npos);
  EXPECT_NE(search_summary(found).find("all orders gave the same bytes"), std::string::npos);
  found.diverged = 9;
  found.divergences.resize(2);
  EXPECT_NE(search_summary(found).find("9, from 2 pairs"), std::string::npos);
}

}  // namespace
}  // namespace sidestream::cli
