// A step with an order: its calls are captured as one sequence. pipeline_rank_test.cpp trains the orders of pipelines.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graph_pool.h"
#include "sidestream/pipeline_order.h"
#include "unit/graphs/called_stack.h"
#include "unit/graphs/captured_order_fixture.h"
#include "unit/sim/rerun/every_order.h"
#include "warnings.h"

namespace sidestream::testing_model {
namespace {

using Kind = PipelineStep::Kind;

TEST_F(CapturedOrderTest, HasACaptureForEachMicrobatchAndHostMemoryForThoseInFlight) {
  OffloadEngine engine(model_, options());
  expect_plain_steps(engine, 0, 2);
  expect_all_replay(engine, 2);
  const Report report = step_of(engine, 3);
  EXPECT_EQ(report.captures, 2 * kLayers * kMicrobatches);
  EXPECT_GT(report.offloaded_bytes, 0);
  std::int64_t largest = 0;  // of a chunk of which all is offloaded
  for (const ChunkReport& chunk : report.chunks) {
    largest = std::max(largest, chunk.offloaded_bytes);
  }
  EXPECT_EQ(report.pinned_requested_bytes, largest * kInFlight);
  EXPECT_EQ(report.notes, std::vector<std::string>());
}

TEST_F(CapturedOrderTest, OneLayerIsOffloadedToo) {
  CalledStack model(device_, {}, 1);
  OffloadEngine engine(model, options());
  for (std::int64_t s = 0; s < 3; ++s) {
    Step step = engine.step(order_);
    (void)run(model, &engine, order_, s);
    step.finish();
  }
  EXPECT_GT(engine.report().offloaded_bytes, 0);
}

TEST_F(CapturedOrderTest, ABudgetBoundsAllItsMicrobatchesTogether) {
  order_ = pipeline_order(PipelineShape{2, 1, 5}, 0);  // two are in flight, so three use the same host memory
  std::int64_t s = 0;
  std::int64_t chunk = 0;  // bytes, without a budget
  const auto offloaded = [&](const Options& options) {
    OffloadEngine engine(model_, options);
    expect_plain_steps(engine, s, s + 3);
    s += 3;
    const Report report = engine.report();
    for (const ChunkReport& each : report.chunks) {
      chunk = std::max(chunk, each.offloaded_bytes);
    }
    return report.offloaded_bytes;
  };
  const std::int64_t all = offloaded(options());
  const std::int64_t of_one = chunk;
  ASSERT_GT(all, 3 * of_one);
  for (const std::int64_t bound : {of_one, 2 * of_one}) {
    const std::int64_t within = offloaded(options().offload_at_most("**", static_cast<std::size_t>(bound)));
    EXPECT_GT(within, 0);
    EXPECT_LE(within, bound);
  }
  const std::int64_t half = offloaded(options().offload_fraction("**", 0.5));
  EXPECT_GT(half, 0);
  EXPECT_LE(half, all / 2);
}

TEST_F(CapturedOrderTest, WithFewerCapturesThanMicrobatchesThoseInFlightAreReused) {
  OffloadEngine engine(model_, options().call_options(CallOptions().max_captures(kMicrobatches - 1)));
  expect_plain_steps(engine, 0, 2);
  expect_all_replay(engine, 2);
  EXPECT_EQ(engine.report().captures, 2 * kLayers * kInFlight);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "the latest order that a step was given needs 6 captures of each call, and",
                      testing::PrintToString(engine.report().notes));
}

TEST_F(CapturedOrderTest, ANoteSaysHowManyCapturesALongerOrderNeedsBesideThoseOfAnEarlierOne) {
  constexpr std::int64_t kLonger = 12;
  for (const std::int64_t bound : {std::int64_t{8}, kLonger}) {  // 8 is the default
    OffloadEngine engine(model_, options().call_options(CallOptions().max_captures(bound)));
    ExpectedWarnings of_the_bound;
    for (std::int64_t s = 0; s < 5; ++s) {
      order_ = pipeline_order(PipelineShape{4, 1, s < 2 ? 8 : kLonger}, 0);
      expect_plain_steps(engine, s, s + 1);
    }
    const Report report = step_of(engine, 5);
    const std::string notes = testing::PrintToString(report.notes);
    const char* const note =
        "the latest order that a step was given needs 12 captures of each call, and CallOptions::max_captures is 8; "
        "calls are captured as without an order, which takes more memory, and run eagerly if captures of earlier "
        "orders leave no room: raise max_captures to 12";
    EXPECT_EQ(notes.find(note) != std::string::npos, bound < kLonger) << notes;
    EXPECT_EQ(report.eager_calls, bound < kLonger ? kLonger * kLayers : 0);
    EXPECT_EQ(of_the_bound.take().empty(), bound == kLonger);
  }
}

/// Orders with owned gradients, whose memory lives as long as the captures: in each kind of memory.
class OwnedInOrderTest : public CapturedOrderTest, public testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(Memory, OwnedInOrderTest, testing::Values("own", "shared", "evaluated", "pool"),
                         [](const auto& memory) { return std::string(memory.param); });

TEST_P(OwnedInOrderTest, GradientsAreNoTensorsThatACallKeeps) {
  const std::string memory = GetParam();
  CallOptions calls = CallOptions().share_memory(memory == "shared");
  GraphOptions graphs = GraphOptions().gradients("**", GradientPolicy::owned);
  if (memory == "evaluated") {
    calls.on_evaluation(OnEvaluation::capture);
  } else if (memory == "pool") {
    graphs.pool(std::make_shared<GraphPool>(device_));
  }
  OffloadEngine engine(model_, options().call_options(calls).graph_options(graphs));
  expect_plain_steps(engine, 0, 2);
  expect_all_replay(engine, 2);
  EXPECT_EQ(engine.report().notes, std::vector<std::string>());
}

TEST_F(CapturedOrderTest, IsKeptWhenWeightsWereRelocated) {
  OffloadEngine engine(model_, options());
  expect_plain_steps(engine, 0, 3);
  const std::int64_t before = engine.report().recaptures;
  relocate(model_);
  relocate(plain_);
  expect_plain_steps(engine, 3, 4);
  expect_all_replay(engine, 4);
  EXPECT_EQ(engine.report().recaptures - before, kLayers * kMicrobatches);
}

TEST_F(CapturedOrderTest, IsKeptWhenOffloadIsSwitched) {
  OffloadEngine engine(model_, options());
  expect_plain_steps(engine, 0, 3);
  engine.set_activation_offloading("all", false);
  expect_plain_steps(engine, 3, 6);
  EXPECT_EQ(step_of(engine, 6).offloaded_bytes, 0);
  engine.set_activation_offloading("all", true);
  expect_plain_steps(engine, 7, 9);
  EXPECT_GT(step_of(engine, 9).offloaded_bytes, 0);
}

TEST_F(CapturedOrderTest, ItsReplaysAreVerified) {
  OffloadEngine engine(model_, options().verify_replays(1));
  expect_plain_steps(engine, 0, 4);
  EXPECT_GT(engine.report().verified_backwards, 0);
}

TEST_F(CapturedOrderTest, OtherOrdersAndStepsWithoutOneAreRight) {
  OffloadEngine engine(model_, options().call_options(CallOptions().max_captures(64)));
  expect_plain_steps(engine, 0, 3);
  std::vector<PipelineStep> later = order_;  // each backward one forward later
  for (std::size_t i = 0; i + 1 < later.size(); ++i) {
    if (later[i].kind == Kind::backward && later[i + 1].kind == Kind::forward) {
      std::swap(later[i], later[i + 1]);
      ++i;
    }
  }
  std::vector<PipelineStep> reverse;  // all forwards, then backwards in reverse
  std::copy_if(order_.begin(), order_.end(), std::back_inserter(reverse),
               [](const PipelineStep& work) { return work.kind == Kind::forward; });
  for (std::int64_t m = kMicrobatches; m-- > 0;) {
    reverse.push_back({0, m, Kind::backward});
  }
  std::int64_t s = 3;
  for (const bool told : {true, false}) {
    for (const std::vector<PipelineStep>& other : {later, reverse, order_}) {
      expect_plain_step(engine, s++, other, told ? &other : nullptr);
      expect_plain_step(engine, s++, other, told ? &other : nullptr);
      expect_all_replay(engine, s++);
    }
  }
}

TEST_F(CapturedOrderTest, ABackwardBeforeItsTurnIsRefusedAndNamed) {
  OffloadEngine engine(model_, options());
  expect_plain_steps(engine, 0, 3);
  std::vector<PipelineStep> early = {order_.begin(), order_.begin() + kInFlight};
  early.push_back({0, 1, Kind::backward});
  const auto steps = [&] {
    const Step step = engine.step(order_);
    (void)run(model_, &engine, early, 3);
  };
  EXPECT_THROWS(UsageError,
                "graphed call \"layers.3\" (stage 0, microbatch 1): expected the backward of graphed call \"layers.3\" "
                "(stage 0, microbatch 0), got this backward; run forwards and backwards in the order that "
                "OffloadEngine::step was given",
                steps());
  clear_gradients(model_);
  expect_plain_steps(engine, 4, 6);
  expect_all_replay(engine, 6);
}

// Its memory would be free for others only behind the order, so a call with a backward must not replay in its place.
// With nothing in flight in between, but they are no repetition.
TEST_F(CapturedOrderTest, PartsThatDifferInTheOrderOfTheirBackwards) {
  order_.clear();
  for (const std::int64_t first : {0, 2}) {
    const std::int64_t turned = first == 0 ? 1 : 0;
    order_.insert(order_.end(), {{0, first, Kind::forward},
                                 {0, first + 1, Kind::forward},
                                 {0, first + turned, Kind::backward},
                                 {0, first + 1 - turned, Kind::backward}});
  }
  for (const std::int64_t shorter : {-1, 1, 2, 3}) {
    OffloadEngine engine(model_, options());
    short_ = shorter;
    expect_plain_steps(engine, 0, 1);
    short_ = -1;
    expect_plain_steps(engine, 1, 3);
    const Report report = step_of(engine, 3);
    EXPECT_EQ(report.replays, 2 * kLayers * 4) << "shorter in the first step: microbatch " << shorter;
    EXPECT_EQ(report.eager_calls, 0);
  }
}

TEST_F(CapturedOrderTest, ACallThatNoBackwardReachesIsCapturedApart) {
  OffloadEngine engine(model_, options().call_options(CallOptions().max_captures(64)));
  calls_in_vain_ = true;
  expect_plain_steps(engine, 0, 3);
  EXPECT_EQ(step_of(engine, 3).eager_calls, 0);
  calls_in_vain_ = false;
  expect_plain_steps(engine, 4, 5);
  expect_all_replay(engine, 5);
}

TEST_F(CapturedOrderTest, AStepThatFailsLeavesItUsable) {
  OffloadEngine engine(model_, options());
  expect_plain_steps(engine, 0, 3);
  for (const std::size_t length : {std::size_t{2}, std::size_t{5}}) {
    try {
      const Step step = engine.step(order_);
      (void)run(model_, &engine, {order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(length)}, 50);
      throw std::runtime_error("the trainer's");
    } catch (const std::runtime_error&) {
      clear_gradients(model_);
    }
    expect_plain_steps(engine, 3 + static_cast<std::int64_t>(length), 4 + static_cast<std::int64_t>(length));
  }
  expect_plain_steps(engine, 10, 11);
  expect_all_replay(engine, 11);
}

// Each output is held until its backward has gone through all layers of its microbatch.
TEST_F(CapturedOrderTest, OutputsThatBackwardsStartFromAreNotCopied) {
  const sim::OneThread one_thread;
  OffloadEngine engine(model_, options());
  expect_plain_steps(engine, 0, 3);
  EXPECT_EQ(step_of(engine, 3).outputs_copied, 0);
}

TEST_F(CapturedOrderTest, OutputsThatAreKeptStayAsTheyWere) {
  OffloadEngine engine(model_, options());
  expect_plain_steps(engine, 0, 3);
  std::vector<at::Tensor> kept;
  std::vector<at::Tensor> copies;
  Step step = engine.step(order_);
  std::map<std::int64_t, at::Tensor> outputs;
  for (const PipelineStep& work : order_) {
    if (work.kind == Kind::forward) {
      const Chunk chunk = engine.chunk({work.stage, work.microbatch});
      outputs[work.microbatch] = model_.forward(rows(90 + work.microbatch, device_).requires_grad_());
      kept.push_back(outputs[work.microbatch].detach());
      copies.push_back(kept.back().cpu());
    } else {
      outputs[work.microbatch].square().mean().backward();
    }
  }
  step.finish();
  for (std::size_t m = 0; m < kept.size(); ++m) {
    EXPECT_TRUE(at::equal(kept[m].cpu(), copies[m])) << "microbatch " << m;
  }
}

}  // namespace
}  // namespace sidestream::testing_model
