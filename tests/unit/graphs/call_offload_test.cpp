// What leaves the device in and between graphed calls.
#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <utility>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "call_fixture.h"
#include "models/block_model.h"
#include "sidestream/call.h"
#include "sidestream/engine.h"
#include "sidestream/scope.h"

namespace sidestream::testing_model {
namespace {

TEST_F(CallTest, PinnedMemoryIsWhatLeavesAndNoMore) {
  OffloadEngine engine(model_, options());
  expect_plain(engine, 0, 4);
  const Report report = engine.report();
  EXPECT_GT(report.offloaded_bytes, 0);
  EXPECT_EQ(report.pinned_requested_bytes, report.offloaded_bytes);
}

TEST_F(CallTest, WhatTurnsRoundWithinTheLagStays) {
  const auto offloaded = [&](const Options& options) {
    OffloadEngine engine(model_, options);
    expect_plain(engine, 0, 4);
    EXPECT_TRUE(engine.report().notes.empty());
    return engine.report().offloaded_bytes;
  };
  const std::int64_t with_two_calls = offloaded(options());
  EXPECT_GT(with_two_calls, 0);
  EXPECT_EQ(offloaded(options().lag(1_GiB)), 0);
  EXPECT_EQ(offloaded(options().lookahead(1_GiB)), with_two_calls);
}

TEST_F(CallTest, ALagThatHoldsNoCallIsRaisedAndSaysSo) {
  OffloadEngine engine(model_, options().lag(1));
  expect_plain(engine, 0, 4);
  const Report report = engine.report();
  ASSERT_EQ(report.notes.size(), 1U);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "Options::lag of 1 bytes is smaller than", report.notes[0]);
  OffloadEngine with_two_calls(model_, options());
  expect_plain(with_two_calls, 0, 4);
  EXPECT_GT(report.offloaded_bytes, with_two_calls.report().offloaded_bytes);
}

TEST_F(CallTest, BudgetsBoundWhatGraphedCallsOffload) {
  const auto offloaded = [&](const Options& options) {
    OffloadEngine engine(model_, options);
    expect_plain(engine, 0, 4);
    return engine.report().offloaded_bytes;
  };
  const std::int64_t all = offloaded(options());
  EXPECT_GT(all, 0);
  EXPECT_EQ(offloaded(options().offload_at_most("**", 1_GiB)), all);
  EXPECT_EQ(offloaded(options().offload_at_most("**", 0)), 0);
  const std::int64_t half = offloaded(options().offload_fraction("**", 0.5));
  EXPECT_GT(half, 0);
  EXPECT_LE(half, all / 2);
}

// The mark was forgotten as soon as the calls replayed.
TEST_F(CallTest, AnOutputThatIsMarkedBetweenCallsStays) {
  using Layer = at::Tensor (*)(const at::Tensor&);
  const Layer doubles = [](const at::Tensor& h) { return h.mul(2); };
  const Layer tanh = [](const at::Tensor& h) { return h.tanh(); };
  const Layer square = [](const at::Tensor& h) { return h * h; };
  const Options options = Options(device_).min_bytes(256).offload("**").lag(1);
  const auto train = [&](const Options* with, Layer first, bool marks) {
    torch::nn::Module model;
    std::optional<OffloadEngine> engine;
    if (with != nullptr) {
      engine.emplace(model, *with);
    }
    at::Tensor x;
    for (std::int64_t s = 0; s < 4; ++s) {
      x = at::linspace(0, 0.1 * static_cast<double>(s), 256, at::kFloat).to(device_).requires_grad_(true);
      in_step(engine ? &*engine : nullptr, [&] {
        const at::Tensor marked = call("a", first, x);
        if (marks && engine) {
          mark_not_offload(marked);
        }
        call("c", square, call("b", square, marked)).sum().backward();
      });
    }
    return std::make_pair(x.grad().cpu(), engine ? engine->report().offloaded_bytes : 0);
  };
  for (const Layer first : {doubles, tanh}) {
    const at::Tensor expected = train(nullptr, first, false).first;
    for (const bool graphs : {false, true}) {
      const Options chosen = graphs ? Options(options).graph("*") : options;
      const auto [gradient, offloaded] = train(&chosen, first, false);
      const auto [gradient_marked, offloaded_marked] = train(&chosen, first, true);
      EXPECT_TRUE(at::equal(gradient, expected));
      EXPECT_TRUE(at::equal(gradient_marked, expected));
      if (first == doubles) {  // else the mark comes after "a" has saved it
        EXPECT_EQ(offloaded - offloaded_marked, 1024) << (graphs ? "graphed" : "eager");
      }
    }
  }
}

// A call whose result its own backward needs, and the next call too: both save it, and the report counts it once.
TEST_F(CallTest, WhatSeveralCallsSavedCountsOnce) {
  const auto report = [&](const Options& options) {
    torch::nn::Module model;
    OffloadEngine engine(model, options);
    const auto layer = [](const at::Tensor& h) { return h.mul(2).tanh(); };
    const auto next = [](const at::Tensor& h) { return (h * h).exp(); };
    for (std::int64_t s = 0; s < 4; ++s) {
      const Step step = engine.step();
      const at::Tensor x = at::full({16, 16}, 0.01, device_).requires_grad_(true);
      call("c", next, call("b", layer, call("a", layer, x))).sum().backward();
    }
    return engine.report();
  };
  const Options options = Options(device_).min_bytes(256).offload("**").lag(1);
  for (const Report& each : {report(options), report(Options(options).graph("*"))}) {
    std::int64_t bytes = 0;
    std::int64_t shared = 0;
    for (const GroupReport& group : each.groups) {
      bytes += group.bytes;
      shared += group.shared_bytes;
      EXPECT_NE(group.kept_because, "held by the program, or saved by several calls") << group.name;
    }
    EXPECT_EQ(bytes, each.saved_bytes);
    EXPECT_EQ(shared, 16 * 16 * 4) << "b's result";
  }
}

// A graphed call's output lies in the graph's own memory: offloading it would free nothing.
TEST_F(CallTest, GraphedOutputsThatEagerScopesSaveStay) {
  OffloadEngine engine(model_, Options(device_).min_bytes(1024).graph("blocks.*").offload("square,last"));
  const auto run = [&](BlockModel& model, std::int64_t step) {
    auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(step));
    const at::Tensor x = at::randn({2, 16, 32}, generator).to(device_).requires_grad_(true);
    const at::Tensor& positions = &model == &model_ ? positions_ : plain_positions_;
    at::Tensor h = x;
    for (auto& block : *model.blocks) {
      h = call(block->as<Block>(), h, stays(&positions), 0);
    }
    {
      const OffloadScope scope("square");
      h = h.square();  // saves what it is given
    }
    {
      const OffloadScope scope("last");
      h = h.tanh();
    }
    h.mean().backward();
  };
  for (std::int64_t s = 0; s < 3; ++s) {
    expect_plain(engine, s, run);
  }
  const Report report = engine.report();
  const auto square = std::find_if(report.groups.begin(), report.groups.end(),
                                   [](const GroupReport& group) { return group.name == "square"; });
  ASSERT_NE(square, report.groups.end());
  EXPECT_EQ(square->kept_because, "it is an output of a graph, and the graph keeps its memory");
  EXPECT_EQ(report.offloaded_bytes, 0);
}

/// Eager scopes before, between and after the graphed blocks.
at::Tensor mixed_loss(BlockModel& model, const at::Tensor& positions, const at::Tensor& x) {
  at::Tensor h = x;
  int i = 0;
  for (auto& block : *model.blocks) {
    {
      const OffloadScope scope(i % 2 == 0 ? "even" : "odd");
      h = h.tanh().exp().mul(0.5);
    }
    h = call(block->as<Block>(), h, stays(&positions), 0);
    ++i;
  }
  h = call(
      "head", [](const at::Tensor& in) { return in.sigmoid().exp(); }, h);
  return h.mean();
}

TEST_F(CallTest, EagerScopesStandBetweenGraphedCalls) {
  for (const char* graphed : {"blocks.*", "blocks.1,blocks.2", "blocks.*,head"}) {
    OffloadEngine engine(model_,
                         Options(device_).min_bytes(1024).graph(graphed).offload("even,odd,blocks.*.fc1,blocks.*.qkv"));
    std::array<at::Tensor, 2> input_grads;  // of the model, of its twin
    for (std::int64_t s = 0; s < 4; ++s) {
      expect_plain(engine, s, [&](BlockModel& model, std::int64_t step) {
        auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(step));
        const at::Tensor x = at::randn({2, 16, 32}, generator).to(device_).requires_grad_(true);
        const at::Tensor& positions = &model == &model_ ? positions_ : plain_positions_;
        mixed_loss(model, positions, x).backward();
        input_grads[&model == &model_ ? 0 : 1] = x.grad().cpu();
      });
      EXPECT_TRUE(at::equal(input_grads[0], input_grads[1])) << graphed << ", step " << s;
    }
    EXPECT_GT(engine.report().offloaded_bytes, 0);
    EXPECT_GT(engine.report().replays, 0);
  }
}

}  // namespace
}  // namespace sidestream::testing_model
