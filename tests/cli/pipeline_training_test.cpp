#include <algorithm>
#include <csignal>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <arpa/inet.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <nlohmann/json.hpp>

#include <sys/socket.h>
#include <unistd.h>

#include "sidestream/error.h"
#include "tests/cli/program.h"
#include "tests/cli/scratch_folder.h"
#include "tests/expect_throws.h"
#include "tools/cli/training_options.h"

namespace sidestream::cli {
namespace {

std::vector<std::string> piped(int ranks, std::vector<std::string> more) {
  more.insert(more.begin(), {"--pp", std::to_string(ranks), "--seq", "64", "--batch", "16", "--microbatches", "8"});
  return more;
}

struct PipelineCase {
  int ranks;
  int stages;
  std::string graphs;
  std::string offload;
  bool delayed = false;
};

class PipelineTraining : public testing::TestWithParam<PipelineCase> {};

TEST_P(PipelineTraining, GradientsEqualThoseOfOneProcess) {
  const auto& [ranks, stages, graphs, offload, delayed] = GetParam();
  std::vector<std::string> options{
      "--vpp", std::to_string(stages), "--layers", "8",       "--graphs", graphs,     "--offload",
      offload, "--side-streams",       "1",        "--steps", "4",        "--compare"};
  if (delayed) {
    options.emplace_back("--dw");
  }
  const auto [out, json] = trained(piped(ranks, options));
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "bit for bit in each of 4 steps, and so are the trained parameters", out);
  EXPECT_TRUE(json["gradients"]["bit_equal"].get<bool>());
  EXPECT_TRUE(json["gradients"]["trained_parameters_equal"].get<bool>());
  EXPECT_EQ(json["gradients"]["parameters"].size(), 3u + 8 * 6);
  ASSERT_EQ(json["modes"].size(), static_cast<std::size_t>(ranks));
  std::int64_t captured = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto& numbers = json["modes"][rank];
    EXPECT_EQ(numbers["name"], "rank " + std::to_string(rank));
    EXPECT_EQ(numbers["offloaded_bytes_per_step"].get<std::int64_t>() > 0, offload == "all");
    captured += numbers["graphs"].get<std::int64_t>();
  }
  // One in each direction for each layer, and more for the microbatches in flight.
  EXPECT_EQ(captured >= 2 * 8, graphs != "off") << captured;
}

INSTANTIATE_TEST_SUITE_P(Cases, PipelineTraining,
                         testing::Values(PipelineCase{1, 1, "layer", "all"}, PipelineCase{1, 2, "layer", "all"},
                                         PipelineCase{2, 1, "off", "off"}, PipelineCase{2, 1, "off", "all"},
                                         PipelineCase{2, 1, "layer", "off"}, PipelineCase{2, 1, "layer", "all"},
                                         PipelineCase{2, 1, "partial", "all"}, PipelineCase{2, 2, "off", "all"},
                                         PipelineCase{2, 2, "layer", "all"}, PipelineCase{4, 1, "layer", "all"},
                                         PipelineCase{4, 2, "layer", "all"}, PipelineCase{2, 1, "layer", "all", true},
                                         PipelineCase{2, 2, "partial", "all", true}),
                         [](const testing::TestParamInfo<PipelineCase>& info) {
                           const PipelineCase& c = info.param;
                           return "Pp" + std::to_string(c.ranks) + "Vpp" + std::to_string(c.stages) + "Graphs_" +
                                  c.graphs + "Offload_" + c.offload + (c.delayed ? "Dw" : "");
                         });

TEST(Pipeline, LossesAreThoseOfOneProcess) {
  const auto losses = [](const std::vector<std::string>& more) { return trained(more).report["train_loss"]; };
  EXPECT_EQ(losses(piped(2, {"--steps", "3"})), losses({"--seq", "64", "--batch", "16", "--microbatches", "8",
                                                        "--steps", "3", "--graphs", "off", "--offload", "off"}));
}

TEST(Pipeline, EachRankReportsItsTimesAndMemory) {
  const auto json = trained(piped(2, {"--side-streams", "1", "--steps", "5"})).report;
  for (const auto& numbers : json["modes"]) {
    EXPECT_EQ(numbers["timed_steps"], 2);
    EXPECT_GT(numbers["peak_live_bytes"], 0);
    EXPECT_GT(numbers["pinned_host_bytes"], 0);
  }
  EXPECT_EQ(json["options"]["pp"], 2);
  EXPECT_FALSE(json.contains("held_out_loss"));
}

TEST(Pipeline, ATraceHasAStepOfEachRank) {
  const ScratchFolder folder;
  const std::string path = (folder.path() / "trace.json").string();
  const ProgramResult result = run_program(tiny_training(piped(2, {"--steps", "5", "--trace", path})));
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "trace: " + path, result.out);
  std::map<int, std::string> ranks;
  std::map<int, std::set<std::int64_t>> microbatches;  // whose graphs or copies ran
  std::map<int, std::set<std::string>> graphs;
  const nlohmann::json trace = nlohmann::json::parse(ScratchFolder::read(path));
  for (const auto& event : trace.at("traceEvents")) {
    const int rank = event.at("pid").get<int>();
    if (event.at("name") == "process_name") {
      ranks[rank] = event.at("args").at("name");
    } else if (event.at("ph") == "X" && event.at("args").contains("microbatch")) {
      microbatches[rank].insert(event.at("args").at("microbatch").get<std::int64_t>());
      graphs[rank].insert(event.at("name").get<std::string>());
    }
  }
  EXPECT_EQ(ranks, (std::map<int, std::string>{{1, "rank 0, step 3, as the host queued it"},
                                               {2, "rank 1, step 3, as the host queued it"}}));
  const std::set<std::int64_t> all{0, 1, 2, 3, 4, 5, 6, 7};
  EXPECT_EQ(microbatches, (std::map<int, std::set<std::int64_t>>{{1, all}, {2, all}}));
  for (const int block : {0, 1, 2, 3}) {
    for (const int rank : {0, 1}) {
      EXPECT_EQ(graphs[rank + 1].count(fmt::format("blocks.{} forward", block)), block / 2 == rank ? 1U : 0U)
          << block << " on rank " << rank;
    }
  }
}

TEST(Pipeline, AReportThatCannotBeWrittenLosesNoTrace) {
  const ScratchFolder folder;
  const std::string trace = (folder.path() / "trace.json").string();
  const ProgramResult result =
      run_program(tiny_training(piped(2, {"--steps", "5", "--report", "/dev/full", "--trace", trace})));
  EXPECT_EQ(result.code, 1);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "cannot be written", result.err);
  EXPECT_TRUE(nlohmann::json::accept(ScratchFolder::read(trace)));
}

TEST(Pipeline, ATrainingThatIsTooShortForATraceLosesNoReport) {
  const ScratchFolder folder;
  const std::string report = (folder.path() / "report.json").string();
  const std::string trace = (folder.path() / "trace.json").string();
  const ProgramResult result =
      run_program(tiny_training(piped(2, {"--steps", "2", "--trace", trace, "--report", report})));
  EXPECT_EQ(result.code, 1);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "no step was traced", result.err);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "report: " + report, result.out);
  EXPECT_EQ(nlohmann::json::parse(ScratchFolder::read(report))["steps_done"], 2);
  EXPECT_FALSE(std::filesystem::exists(trace));
}

TEST(Pipeline, ReplaysOfAllRanksAreVerified) {
  const auto json = trained(piped(2, {"--steps", "4", "--verify-replays", "2"})).report;
  EXPECT_GE(json["verified"]["forwards"], 4);  // of each layer
}

TEST(Pipeline, EachRankHasAGpuOfItsOwn) {
  const ProgramResult result = run_program(tiny_training(piped(2, {"--device", "cuda", "--steps", "4", "--compare"})));
  if (result.code == 0) {  // two GPUs
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "bit for bit in each of 4 steps, and so are the trained parameters",
                        result.out);
  } else {
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "rank 1: ", result.err);
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "cuda:1", result.err);
  }
}

TEST(Pipeline, CtrlCEndsAllRanksAfterTheSameStep) {
  Program program(tiny_training(piped(2, {"--steps", "100000"})));
  ASSERT_TRUE(program.wait_for("step   "));
  program.signal(SIGINT);
  const ProgramResult result = program.finish();
  EXPECT_EQ(result.code, 130) << result.signal << result.err;
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "ended by Ctrl-C", result.out);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "rank 1", result.out);
}

TEST(Pipeline, ASecondSignalEndsAllRanksAtOnce) {
  // A step that lasts for seconds: the first signal cannot have ended the ranks when the second comes.
  Program program(tiny_training(
      piped(2, {"--steps", "100000", "--layers", "4", "--hidden", "256", "--ffn", "1024", "--seq", "256"})));
  ASSERT_TRUE(program.wait_for("step   "));
  program.signal(SIGHUP);
  program.signal(SIGHUP);  // a terminal that closes sends several
  ASSERT_TRUE(program.wait_for_error("ends after this step"));
  program.signal(SIGINT);
  const ProgramResult result = program.finish();
  EXPECT_EQ(result.code, 130) << result.signal << result.err;
  EXPECT_PRED_FORMAT2(testing::IsNotSubstring, "sidestream: rank", result.err);
  EXPECT_PRED_FORMAT2(testing::IsNotSubstring, "ended by", result.out);
}

TEST(Pipeline, ARankThatDiesIsNamedByTheOthers) {
  for (const int dying : {0, 2}) {
    Program program(tiny_training(piped(3, {"--steps", "100000", "--graphs", "off"})));
    ASSERT_TRUE(program.wait_for("step   "));
    const std::vector<int> ranks = program.children();
    ASSERT_EQ(ranks.size(), 3u);
    kill(ranks[dying], SIGKILL);
    const ProgramResult result = program.finish();
    EXPECT_EQ(result.code, 1) << result.signal << result.err;
    const std::string text =
        "rank " + std::to_string(dying) + " (process " + std::to_string(ranks[dying]) + ") was ended by signal 9";
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "sidestream: " + text, result.err);
    for (int other = 0; other < 3; ++other) {
      if (other != dying) {
        EXPECT_PRED_FORMAT2(testing::IsSubstring, "sidestream: rank " + std::to_string(other) + ": " + text,
                            result.err);
      }
    }
  }
}

/// Ranks that a test starts, as a user does on several machines.
class StartedRanks {
 public:
  /// `first`: more arguments of rank 0.
  StartedRanks(int ranks, const std::vector<std::string>& more, const std::vector<std::string>& first = {}) {
    const std::string port = std::to_string(free_port());
    for (int rank = 0; rank < ranks; ++rank) {
      std::vector<std::string> arguments = more;
      arguments.insert(arguments.end(), first.begin(), rank == 0 ? first.end() : first.begin());
      programs_.push_back(std::make_unique<Program>(tiny_training(piped(ranks, arguments)),
                                                    "export RANK=" + std::to_string(rank) +
                                                        " WORLD_SIZE=" + std::to_string(ranks) +
                                                        " MASTER_ADDR=127.0.0.1 MASTER_PORT=" + port));
    }
  }
  Program& operator[](std::size_t rank) { return *programs_[rank]; }

 private:
  static int free_port() {
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    EXPECT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size), 0);
    close(listener);
    return ntohs(address.sin_port);
  }

  std::vector<std::unique_ptr<Program>> programs_;
};

TEST(PipelineFromTheEnvironment, TrainsAndTheLastRankPrints) {
  StartedRanks ranks(2, {"--steps", "4", "--compare"});
  const ProgramResult first = ranks[0].finish();
  const ProgramResult last = ranks[1].finish();
  EXPECT_EQ(first.code, 0) << first.err;
  EXPECT_EQ(last.code, 0) << last.err;
  EXPECT_EQ(first.out, "");
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "bit for bit in each of 4 steps", last.out);
}

TEST(PipelineFromTheEnvironment, ARankThatFailsIsNamedByTheOthers) {
  StartedRanks ranks(2, {"--steps", "3"}, {"--offload", "blocks.*.router"});  // matches nothing
  const ProgramResult first = ranks[0].finish();
  const ProgramResult other = ranks[1].finish();
  EXPECT_EQ(first.code, 2) << first.err;
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "core_attn", first.err);
  EXPECT_EQ(other.code, 1) << other.err;
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "rank 0 failed: ", other.err);
}

TEST(PipelineFromTheEnvironment, ASilentRankIsNamedByThoseThatWaitForOthers) {
  StartedRanks ranks(3, {"--steps", "100000", "--graphs", "off", "--rank-timeout", "8"});
  ASSERT_TRUE(ranks[2].wait_for("step   "));
  ranks[2].signal(SIGSTOP);
  for (const std::size_t rank : {0, 1}) {
    const ProgramResult result = ranks[rank].finish();
    EXPECT_EQ(result.code, 1) << result.signal;
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "rank 2 has sent nothing for 8 s", result.err);
  }
}

TEST(PipelineFromTheEnvironment, WithoutTheStoreTheOthersEnd) {
  StartedRanks ranks(2, {"--steps", "100000", "--graphs", "off"});
  ASSERT_TRUE(ranks[1].wait_for("step   "));
  ranks[0].signal(SIGKILL);
  const ProgramResult result = ranks[1].finish();
  EXPECT_EQ(result.code, 1) << result.signal;
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "rank 0, or the program that started the ranks, has ended", result.err);
}

TEST(PipelineFromTheEnvironment, VariablesThatDoNotFitAreRefused) {
  const auto refused = [](const std::string& variables, const std::string& part) {
    expect_refusal(tiny_training(piped(2, {})), 2, part, "export " + variables);
  };
  refused("RANK=0", "RANK is set, but WORLD_SIZE is not");
  refused("RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=70000", "MASTER_PORT is '70000'");
  refused("RANK=0 WORLD_SIZE=2 LOCAL_RANK=2", "LOCAL_RANK is '2'; it must be a number from 0 to 1");
  refused("RANK=0 WORLD_SIZE=3 MASTER_ADDR=localhost MASTER_PORT=1", "WORLD_SIZE is 3, but --pp is 2");
}

TEST(Pipeline, OptionsThatDoNotFitAreRefused) {
  const auto refused = [](const std::function<void(TrainingOptions&)>& change, const std::string& part) {
    TrainingOptions options;
    options.pp = 2;
    change(options);
    EXPECT_THROWS(UsageError, part, validate(options));
  };
  refused([](auto& o) { o.pp = 0; }, "--pp is 0; it must be from 1 to 64");
  refused([](auto& o) { o.vpp = 0; }, "--vpp is 0; it must be from 1 to 64");
  refused([](auto& o) { o.rank_timeout = 0; }, "--rank-timeout is 0");
  refused([](auto& o) { o.model = "moe"; }, "--model moe does not work with --pp");
  refused([](auto& o) { o.graphs = "step"; }, "use --graphs layer");
  refused([](auto& o) { o.check_steps = 2; }, "--check-steps does not work with --pp");
  refused([](auto& o) { o.find_syncs = true; }, "--find-syncs does not work with --pp");
  refused([](auto& o) { o.dump_graphs = "graphs"; }, "--dump-graphs does not work with --pp");
  refused([](auto& o) { o.vpp = 4; }, "use --layers 8 or more");
  refused([](auto& o) { o.pp.reset(), o.vpp = 2; }, "add --pp");
  refused([](auto& o) { o.pp.reset(), o.delay_weight_gradients = true; },
          "--dw delays the weight gradients of a pipeline");
  refused([](auto& o) { o.graphs = "off", o.delay_weight_gradients = true; }, "use --graphs layer");
  expect_refusal(tiny_training(piped(2, {"--report", "/nowhere/report.json"})), 2, "--report");
  expect_refusal(tiny_training(piped(2, {"--trace", "/nowhere/trace.json"})), 2, "--trace");
}

}  // namespace
}  // namespace sidestream::cli
