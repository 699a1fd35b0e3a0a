// What a report says of each way to train: no name and no reason is blank, and the parts add up to the totals.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "models/block_model.h"
#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "models/stack_twins.h"
#include "sidestream/bucketed_callables.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_step.h"
#include "sidestream/pipeline_order.h"
#include "warnings.h"

namespace sidestream::testing_model {
namespace {

/// Trains in each way, and gives the report.
struct ReportedWays {
  static constexpr std::int64_t kSteps = 5;  // the third is traced

  static c10::Device device() { return find_device("sim"); }

  /// Loss and backward of microbatch `m`, in steps of `engine` and in `order`, if it is not empty.
  static void train(OffloadEngine& engine, const std::vector<PipelineStep>& order,
                    const std::function<at::Tensor(std::int64_t m)>& loss) {
    for (std::int64_t s = 0; s < kSteps; ++s) {
      if (order.empty()) {
        const Step step = engine.step();
        loss(s).backward();
        continue;
      }
      const Step step = engine.step(order);
      std::map<std::int64_t, at::Tensor> losses;
      for (const PipelineStep& work : order) {
        if (work.kind == PipelineStep::Kind::forward) {
          const Chunk chunk = engine.chunk({work.stage, work.microbatch});
          losses[work.microbatch] = loss(4 * s + work.microbatch);
        } else {
          losses[work.microbatch].backward();
        }
      }
    }
  }

  /// Blocks that run eagerly or in ss::call.
  static Report of_blocks(const std::string& graphed, const std::vector<PipelineStep>& order = {}) {
    BlockModel model{BlockModel::Shape{}};
    model.to(device());
    Options options = Options(device()).min_bytes(1024).offload("blocks.*.*").lag(0).lookahead(0);
    if (!graphed.empty()) {
      options.graph(graphed);
    }
    OffloadEngine engine(model, options);
    train(engine, order, [&](std::int64_t m) { return model.loss_of(m, 0); });
    return engine.report();
  }

  static Report eager() { return of_blocks(""); }

  static Report calls() { return of_blocks("blocks.*"); }

  static Report calls_and_eager_groups() { return of_blocks("blocks.{0,2}"); }

  /// The first of two ranks: later microbatches take the host slots of earlier ones.
  static Report chunks_in_an_order() { return of_blocks("blocks.*", pipeline_order({2, 1, 4}, 0)); }

  static Report callables() {
    StackTwins twins(device());
    twins.capture();
    train(*twins.engine, {}, [&](std::int64_t s) { return twins.loss(true, twins.input(s), s); });
    return twins.engine->report();
  }

  static Report buckets() {
    torch::nn::Sequential model = layer_stack(4, device());
    OffloadEngine engine(*model, Options(device()).offload("layers.*.*").min_bytes(256));
    std::vector<Callable> callables;
    for (const torch::nn::AnyModule& layer : *model) {
      callables.emplace_back("layers." + std::to_string(callables.size()), layer);
    }
    std::vector<std::vector<std::vector<Sample>>> samples;
    for (const std::int64_t length : {16, 8}) {
      auto& bucket = samples.emplace_back();
      bucket.push_back({rows(0, device()).narrow(0, 0, length).clone().requires_grad_(true)});
      while (bucket.size() < callables.size()) {
        bucket.push_back({Sample::output_of(static_cast<std::int64_t>(bucket.size()) - 1)});
      }
    }
    ExpectedWarnings warnings;
    const std::vector<GraphedCallable> layers = make_bucketed_callables(engine, callables, samples, BucketOptions());
    train(engine, {}, [&](std::int64_t s) {
      at::Tensor h = rows(s, device()).narrow(0, 0, s == 1 ? 4 : 16).clone().requires_grad_(true);
      for (const GraphedCallable& layer : layers) {
        h = layer({h})[0];
      }
      return h.square().mean();
    });
    (void)warnings.take();  // the second step's rows fit no bucket
    return engine.report();
  }

  static Report whole_step() {
    torch::nn::Sequential model = layer_stack(4, device());
    OffloadEngine engine(*model, Options(device()).offload("fc1").min_bytes(256));
    const auto loss = [](torch::nn::SequentialImpl& layers, const Tensors& inputs) {
      return Tensors{layers.forward(inputs[0]).square().sum()};
    };
    const auto data = [](std::int64_t s) {
      return std::vector<Tensors>{{rows(s, device(), 0)}, {rows(s, device(), 1)}};  // two microbatches
    };
    const GraphedStep step = make_graphed_step(engine, Callable("step", loss, model), data(0));
    for (std::int64_t s = 0; s < kSteps; ++s) {
      (void)step(data(s));
    }
    return engine.report();
  }
};

struct ReportedWay {
  const char* name;
  Report (*report)();
  /// Each capture of the plan ran once in the latest step. Else the groups have more bytes than a step offloads.
  bool runs_all_groups = true;
  std::int64_t chunks = 0;
  bool traced = true;
};

/// Neither empty, nor spaces alone, nor with an empty name in quotes.
bool says_something(const std::string& text) {
  return text.find_first_not_of(" \t\n") != std::string::npos && text.find("\"\"") == std::string::npos;
}

class ReportNamesTest : public testing::TestWithParam<ReportedWay> {};

TEST_P(ReportNamesTest, NothingIsWithoutAName) {
  const Report report = GetParam().report();
  for (const GroupReport& group : report.groups) {
    EXPECT_PRED1(says_something, group.name);
    EXPECT_EQ(group.offloaded_bytes < group.bytes, !group.kept_because.empty()) << group.name;
  }
  for (const TimesReport& times : report.times) {
    EXPECT_PRED1(says_something, times.name);
  }
  for (const ExclusionReport& exclusion : report.exclusions) {
    EXPECT_PRED1(says_something, exclusion.reason);
    EXPECT_GT(exclusion.tensors, 0) << exclusion.reason;
  }
  for (const std::string& note : report.notes) {
    EXPECT_PRED1(says_something, note);
  }
  ASSERT_EQ(static_cast<std::int64_t>(report.chunks.size()), GetParam().chunks);
  for (std::int64_t c = 0; c < GetParam().chunks; ++c) {
    EXPECT_EQ(report.chunks[static_cast<std::size_t>(c)].microbatch, c);
  }
  const auto is_unscoped = [](const GroupReport& group) { return group.name == "(no scope)"; };
  EXPECT_TRUE(std::any_of(report.groups.begin(), report.groups.end(), is_unscoped)) << "the program has such a group";
}

TEST_P(ReportNamesTest, PartsAddUpToTheTotals) {
  const Report report = GetParam().report();
  const auto sum = [](const auto& parts, auto member) {
    return std::accumulate(parts.begin(), parts.end(), std::int64_t{0},
                           [&](std::int64_t all, const auto& part) { return all + part.*member; });
  };
  EXPECT_GT(report.offloaded_bytes, 0);
  const std::int64_t planned = sum(report.groups, &GroupReport::offloaded_bytes);
  if (GetParam().runs_all_groups) {
    EXPECT_EQ(planned, report.offloaded_bytes);
  } else {
    EXPECT_GT(planned, report.offloaded_bytes);
  }
  EXPECT_EQ(report.traced_step, GetParam().traced ? 3 : 0);
  if (GetParam().traced) {  // the steps after it are like it
    EXPECT_EQ(sum(report.times, &TimesReport::offloaded_bytes), report.offloaded_bytes);
    EXPECT_EQ(sum(report.times, &TimesReport::reloaded_bytes), report.reloaded_bytes);
  }
  if (GetParam().chunks > 0) {  // all calls are in chunks
    EXPECT_EQ(sum(report.chunks, &ChunkReport::offloaded_bytes), report.offloaded_bytes);
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, ReportNamesTest,
                         testing::Values(ReportedWay{"Eager", &ReportedWays::eager},
                                         ReportedWay{"Calls", &ReportedWays::calls},
                                         ReportedWay{"CallsAndEagerGroups", &ReportedWays::calls_and_eager_groups},
                                         ReportedWay{"ChunksInAnOrder", &ReportedWays::chunks_in_an_order,
                                                     /*runs_all_groups=*/true, /*chunks=*/4},
                                         ReportedWay{"Callables", &ReportedWays::callables},
                                         ReportedWay{"Buckets", &ReportedWays::buckets, /*runs_all_groups=*/false},
                                         ReportedWay{"WholeStep", &ReportedWays::whole_step, /*runs_all_groups=*/true,
                                                     /*chunks=*/0, /*traced=*/false}),
                         [](const testing::TestParamInfo<ReportedWay>& info) { return info.param.name; });

}  // namespace
}  // namespace sidestream::testing_model
