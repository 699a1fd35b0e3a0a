#include "tools/cli/training_options.h"

#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

#include "sidestream/error.h"
#include "tests/expect_throws.h"
#include "tools/cli/trained_model.h"

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
  EXPECT_EQ(refusal([](auto& o) { o.shape.hidden = 98; }),
            "--hidden 98 is not divisible by --heads 4; 96 or 100 would be");
  EXPECT_EQ(refusal([](auto& o) { o.shape.kv_heads = 3; }),
            "--heads 4 is not divisible by --kv-heads 3; 3 or 6 would be");
  EXPECT_EQ(refusal([](auto& o) {
              o.shape.heads = 2;
              o.shape.kv_heads = 3;
            }),
            "--heads 2 is not divisible by --kv-heads 3; 3 would be");
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

using Names = std::vector<std::string>;

/// Those of `names`, for a model and its graphs.
TrainingOptions with_names(const Names& names, const char* model = "dense", const char* graphs = "layer") {
  TrainingOptions options;
  options.offload = names;
  options.model = model;
  options.graphs = graphs;
  return options;
}

TEST(OffloadPatterns, NamesBecomePatternsOfEveryLayer) {
  EXPECT_TRUE(offload_patterns(with_names({"off"})).empty());
  EXPECT_EQ(offload_patterns(with_names({"all"})), Names{"blocks.**"});
  EXPECT_EQ(offload_patterns(with_names({"qkv", "core_attn"})), (Names{"blocks.*.qkv", "blocks.*.core_attn"}));
  EXPECT_EQ(offload_patterns(with_names({"blocks.0.fc1", "**.act"})), (Names{"blocks.0.fc1", "**.act"}));
}

TEST(OffloadPatterns, NamesFollowTheCallsThatALayerIsMadeOf) {
  EXPECT_EQ(offload_patterns(with_names({"qkv", "fc1"}, "dense", "partial")),
            (Names{"blocks.*.attention.qkv", "blocks.*.fc1"}));
  EXPECT_EQ(offload_patterns(with_names({"router", "fc1"}, "moe", "partial")),
            (Names{"blocks.*.front.router", "blocks.*.experts.fc1"}));
}

TEST(OffloadPatterns, WhatLeavesOfTheEagerPartIsDelayed) {
  EXPECT_TRUE(delay_patterns(with_names({"all"})).empty());
  EXPECT_EQ(delay_patterns(with_names({"all"}, "moe", "partial")), Names{"blocks.*.experts.*"});
  EXPECT_EQ(delay_patterns(with_names({"qkv", "act"}, "moe", "partial")), Names{"blocks.*.experts.act"});
  EXPECT_EQ(delay_patterns(with_names({"qkv", "act"}, "dense", "partial")), Names{"blocks.*.act"});
  TrainingOptions options = with_names({"all"}, "moe", "partial");
  options.delay = "off";
  EXPECT_TRUE(delay_patterns(options).empty());
}

TEST(OffloadPatterns, UnknownNameListsTheScopes) {
  const auto refused = [](const TrainingOptions& options) {
    try {
      (void)offload_patterns(options);
    } catch (const UsageError& error) {
      return std::string(error.what());
    }
    return std::string("nothing was refused");
  };
  for (const auto& names : std::vector<Names>{
           {"attention"}, {"qkv", "attention"}, {"qkv", ""}, {""}, {}, {"all", "qkv"}, {"qkv", "off"}, {"router"}}) {
    const std::string words = refused(with_names(names));
    EXPECT_NE(words.find("norm1, qkv, core_attn, proj, norm2, fc1, act, fc2"), std::string::npos) << words;
  }
  const std::string words = refused(with_names({"attention"}, "moe", "partial"));
  EXPECT_NE(words.find("router, permute, fc1, act, fc2, combine"), std::string::npos) << words;
}

TEST(TrainingOptions, AModelHasItsOwnGraphs) {
  EXPECT_EQ(TrainingOptions().graph_mode(), "layer");
  TrainingOptions mixture;
  mixture.model = "moe";
  EXPECT_EQ(mixture.graph_mode(), "partial");
  EXPECT_TRUE(mixture.graphed());
}

TEST(TrainingOptions, AMixtureInWholeLayersNeedsFixedShapes) {
  const auto layers = [](TrainingOptions& o) {
    o.model = "moe";
    o.graphs = "layer";
  };
  EXPECT_NE(refusal(layers).find("--capacity 1.25"), std::string::npos);
  EXPECT_EQ(refusal([&](auto& o) {
              layers(o);
              o.capacity = 1.25;
            }),
            "");
}

TEST(TrainingOptions, WhatAMixtureIsMadeOfIsChecked) {
  EXPECT_NE(refusal([](auto& o) { o.experts = 4; }).find("--model moe"), std::string::npos);
  EXPECT_NE(refusal([](auto& o) { o.capacity = 1; }).find("--model moe"), std::string::npos);
  const auto mixture = [](const std::function<void(TrainingOptions&)>& change) {
    return refusal([&](TrainingOptions& o) {
      o.model = "moe";
      change(o);
    });
  };
  EXPECT_EQ(mixture([](auto&) {}), "");
  EXPECT_EQ(mixture([](auto& o) { o.top_k = 5; }), "--top-k is 5; it must be from 1 to 4");
  EXPECT_EQ(mixture([](auto& o) { o.experts = 0; }), "--experts is 0; it must be from 1 to 4096");
  EXPECT_NE(mixture([](auto& o) { o.capacity = -1; }).find("--capacity is -1"), std::string::npos);
  EXPECT_NE(mixture([](auto& o) { o.capacity = std::nan(""); }).find("--capacity is nan"), std::string::npos);
}

TEST(TrainingOptions, OnlyAnEagerPartThatLeavesIsDelayed) {
  const auto delayed = [](const char* graphs, const char* offload) {
    return refusal([&](TrainingOptions& o) {
      o.delay = "on";
      o.graphs = graphs;
      o.offload = {offload};
    });
  };
  EXPECT_EQ(delayed("partial", "all"), "");
  EXPECT_NE(delayed("layer", "all").find("--delay on with --graphs layer"), std::string::npos);
  EXPECT_NE(delayed("partial", "off").find("--delay on with --offload off"), std::string::npos);
  EXPECT_NE(delayed("partial", "qkv").find("no scope of the eager part"), std::string::npos);
  EXPECT_NE(delayed("partial", "blocks.*.act").find("name such scopes, not patterns"), std::string::npos);
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

TEST(TrainingOptions, ABatchThatIsNotGivenFitsTheMicrobatches) {
  const auto batch = [](const std::string& line) {
    CLI::App app;
    TrainingOptions options;
    declare_training_options(app, options);
    app.parse(line);
    return options.batch;
  };
  EXPECT_EQ(batch(""), 6);
  EXPECT_EQ(batch("--microbatches 3"), 6);
  EXPECT_EQ(batch("--microbatches 8"), 8);
  EXPECT_EQ(batch("--microbatches 4"), 8);
  EXPECT_EQ(batch("--microbatches 4 --batch 6"), 6);
  EXPECT_EQ(batch("--microbatches 0"), 6);
  EXPECT_EQ(batch("--microbatches 1048576"), 1 << 20);
  for (const char* line : {"--microbatches 1048577", "--microbatches 9223372036854775807"}) {
    EXPECT_THROWS(UsageError, "it must be from 1 to 1048576", (void)batch(line));
  }
}

std::vector<std::string> parsed_offload(const std::string& line) {
  CLI::App app;
  TrainingOptions options;
  declare_training_options(app, options);
  app.parse(line);
  return options.offload;
}

TEST(TrainingOptions, OffloadIsACommaListOfWhichTheLastCounts) {
  EXPECT_EQ(parsed_offload(""), Names{"all"});
  EXPECT_EQ(parsed_offload("--offload off"), Names{"off"});
  EXPECT_EQ(parsed_offload("--offload qkv,core_attn,blocks.*.fc1"), (Names{"qkv", "core_attn", "blocks.*.fc1"}));
  EXPECT_EQ(parsed_offload("--offload qkv,proj --steps 3 --offload act"), Names{"act"});
  EXPECT_EQ(parsed_offload("--offload off --offload qkv,proj"), (Names{"qkv", "proj"}));
  EXPECT_THROW((void)parsed_offload("--offload qkv proj"), CLI::ParseError) << "one argument, with commas";
  EXPECT_THROW((void)parsed_offload("--offload"), CLI::ParseError);
}

TEST(TrainingOptions, CommasInBracesDoNotSplitOffload) {
  const auto patterns = [](const std::string& line) { return offload_patterns(with_names(parsed_offload(line))); };
  EXPECT_EQ(patterns("--offload blocks.{1,5,8..12}.fc1,qkv"), (Names{"blocks.{1,5,8..12}.fc1", "blocks.*.qkv"}));
  EXPECT_EQ(patterns("--offload blocks.{0,1}.{qkv,fc1}"), Names{"blocks.{0,1}.{qkv,fc1}"});
}

// CLI11 refuses an empty list or hands it on, by its version.
TEST(TrainingOptions, OffloadOfNothingIsRefused) {
  for (const char* line : {"--offload ''", "--offload ,"}) {
    bool refused = false;
    try {
      (void)offload_patterns(with_names(parsed_offload(line)));
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
