#include "tools/cli/training_options.h"

#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

#include "sidestream/error.h"

namespace sidestream::cli {
namespace {

std::string refusal(const std::function<void(TrainingOptions&)>& change) {
  TrainingOptions options;
  change(options);
  try {
    validate(options);
  } catch (const UsageError& error) {
    return error.what();
  }
  return {};
}

TEST(TrainingOptions, DefaultsAreValid) {
  EXPECT_EQ(refusal([](TrainingOptions&) {}), "");
}

TEST(TrainingOptions, SizesThatDoNotDivideSayWhatWould) {
  EXPECT_EQ(refusal([](auto& o) { o.shape.hidden = 98; }), "--hidden 98 does not divide by --heads 4; 96 or 100 would");
  EXPECT_EQ(refusal([](auto& o) { o.shape.kv_heads = 3; }), "--heads 4 does not divide by --kv-heads 3; 3 or 6 would");
  const std::string odd = refusal([](auto& o) { o.shape.hidden = 12; });
  EXPECT_NE(odd.find("even"), std::string::npos) << odd;
}

TEST(TrainingOptions, NumbersBelowOneAreRefused) {
  EXPECT_NE(refusal([](auto& o) { o.side_streams = 0; }).find("--side-streams is 0; it must be from 1"),
            std::string::npos);
  EXPECT_NE(refusal([](auto& o) { o.shape.layers = 0; }), "");
  EXPECT_NE(refusal([](auto& o) { o.shape.heads = 0; }), "");
  EXPECT_NE(refusal([](auto& o) { o.shape.kv_heads = -1; }), "");
  EXPECT_NE(refusal([](auto& o) { o.batch = 0; }), "");
  EXPECT_NE(refusal([](auto& o) { o.steps = 0; }), "");
  EXPECT_NE(refusal([](auto& o) { o.shape.seq = 0; }), "");
}

TEST(TrainingOptions, ScheduleIsTheSimDevicesOwn) {
  EXPECT_EQ(refusal([](auto& o) { o.schedule = "seed:3"; }), "");
  EXPECT_NE(refusal([](auto& o) { o.schedule = "whenever"; }), "");
  const std::string on_cuda = refusal([](auto& o) {
    o.schedule = "late";
    o.device = "cuda";
  });
  EXPECT_NE(on_cuda.find("--device sim"), std::string::npos) << on_cuda;
}

TEST(OffloadPatterns, NamesBecomePatternsOfEveryLayer) {
  EXPECT_TRUE(offload_patterns({"off"}).empty());
  EXPECT_EQ(offload_patterns({"all"}), std::vector<std::string>{"blocks.**"});
  EXPECT_EQ(offload_patterns({"qkv", "core_attn"}), (std::vector<std::string>{"blocks.*.qkv", "blocks.*.core_attn"}));
  EXPECT_EQ(offload_patterns({"blocks.0.fc1", "**.act"}), (std::vector<std::string>{"blocks.0.fc1", "**.act"}));
}

TEST(OffloadPatterns, UnknownNameListsTheScopes) {
  for (const auto& names : std::vector<std::vector<std::string>>{
           {"attention"}, {"qkv", "attention"}, {"qkv", ""}, {""}, {}, {"all", "qkv"}, {"qkv", "off"}}) {
    try {
      (void)offload_patterns(names);
      ADD_FAILURE() << names.size() << " names";
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find("norm1, qkv, core_attn, proj, norm2, fc1, act, fc2"), std::string::npos)
          << error.what();
    }
  }
}

TEST(TrainingOptions, ParseFromACommandLine) {
  CLI::App app;
  TrainingOptions options;
  declare_training_options(app, options);
  app.parse(
      "--layers 2 --hidden 64 --heads 2 --kv-heads 1 --ffn 96 --seq 32 --batch 3 --dtype bfloat16 --steps 9 --seed 11 "
      "--offload qkv "
      "--graphs off --side-streams 4 --schedule late --compare --report r.json --device sim --text a b");
  EXPECT_EQ(options.shape.layers, 2);
  EXPECT_EQ(options.shape.kv_heads, 1);
  EXPECT_EQ(options.tokens_per_step(), 96);
  EXPECT_EQ(options.dtype, "bfloat16");
  EXPECT_EQ(options.seed, 11u);
  EXPECT_FALSE(options.graphed());
  EXPECT_TRUE(options.offloads());
  EXPECT_EQ(options.side_streams, 4);
  EXPECT_TRUE(options.compare);
  EXPECT_EQ(options.text.size(), 2u);
  EXPECT_EQ(options.report, "r.json");
}

TEST(TrainingOptions, ARepeatedOptionCountsOnceAndTheLastOneWins) {
  CLI::App app;
  TrainingOptions options;
  declare_training_options(app, options);
  app.parse("--steps 9 --steps 4 --compare --compare --text a --text b c");
  EXPECT_EQ(options.steps, 4);
  EXPECT_EQ(options.text.size(), 3u);
}

std::vector<std::string> parsed_offload(const std::string& line) {
  CLI::App app;
  TrainingOptions options;
  declare_training_options(app, options);
  app.parse(line);
  return options.offload;
}

TEST(TrainingOptions, OffloadIsACommaListOfWhichTheLastCounts) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(parsed_offload(""), Names{"all"});
  EXPECT_EQ(parsed_offload("--offload off"), Names{"off"});
  EXPECT_EQ(parsed_offload("--offload qkv,core_attn,blocks.*.fc1"), (Names{"qkv", "core_attn", "blocks.*.fc1"}));
  EXPECT_EQ(parsed_offload("--offload qkv,proj --steps 3 --offload act"), Names{"act"});
  EXPECT_EQ(parsed_offload("--offload off --offload qkv,proj"), (Names{"qkv", "proj"}));
  EXPECT_THROW((void)parsed_offload("--offload qkv proj"), CLI::ParseError) << "one argument, with commas";
  EXPECT_THROW((void)parsed_offload("--offload"), CLI::ParseError);
}

// CLI11 refuses an empty list or hands it on, by its version.
TEST(TrainingOptions, OffloadOfNothingIsRefused) {
  for (const char* line : {"--offload ''", "--offload ,"}) {
    bool refused = false;
    try {
      (void)offload_patterns(parsed_offload(line));
    } catch (const CLI::ParseError&) {
      refused = true;
    } catch (const UsageError&) {
      refused = true;
    }
    EXPECT_TRUE(refused) << line;
  }
}

}  // namespace
}  // namespace sidestream::cli
