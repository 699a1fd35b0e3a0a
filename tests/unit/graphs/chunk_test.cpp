// Chunks of a step: what belongs to them, and each bad input. pipeline_rank_test.cpp runs them in the orders of pipelines.
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "models/layer_stack.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/owning.h"
#include "sidestream/pipeline_order.h"
#include "sidestream/scope.h"
#include "unit/graphs/chunk_fixture.h"
#include "unit/graphs/counted_heap.h"
#include "warnings.h"

namespace sidestream::testing_model {
namespace {

using Kind = PipelineStep::Kind;
TEST_F(ChunkTest, OutsideOfAStep) {
  EXPECT_THROWS(UsageError, "outside of a step; begin the step first", (void)engine_.chunk({0, 0}));
  expect_usable(engine_);
}

TEST_F(ChunkTest, OfAnEngineThatWasMovedFrom) {
  Step step = engine_.step();
  Chunk chunk = engine_.chunk({0, 0});
  OffloadEngine other(std::move(engine_));
  EXPECT_THROWS(UsageError, "was moved from", (void)engine_.chunk({0, 1}));
  chunk.finish();
  other.chunk({0, 1}).finish();
  step.finish();
  expect_usable(other);
}

TEST_F(ChunkTest, WeightGradientsOfAnUnknownChunkAndASecondTime) {
  Step step = engine_.step();
  Chunk chunk = engine_.chunk({0, 0});
  const at::Tensor loss = model_.forward(rows(1, device_)).square().mean();
  chunk.finish();
  loss.backward();
  EXPECT_THROWS(UsageError, "got stage 0, microbatch 1, which this step has not had", engine_.backward_dw({0, 1}));
  engine_.backward_dw({0, 0});  // none are delayed
  EXPECT_THROWS(UsageError, "stage 0, microbatch 0 are computed already", engine_.backward_dw({0, 0}));
  step.finish();
  expect_usable(engine_);
}

TEST_F(ChunkTest, WeightGradientsBeforeTheBackward) {
  OffloadEngine engine(model_, options().graph_options(GraphOptions().gradients("**", GradientPolicy::delayed)));
  for (std::int64_t s = 0; s < 3; ++s) {  // recorded, captured, replayed
    Step step = engine.step();
    Chunk chunk = engine.chunk({0, 0});
    const at::Tensor loss = model_.forward(rows(s, device_)).square().mean();
    chunk.finish();
    EXPECT_THROWS(UsageError,
                  "the backward of graphed call \"layers.0\" in stage 0, microbatch 0 has not run; call it after",
                  engine.backward_dw({0, 0}));
    loss.backward();
    engine.backward_dw({0, 0});
    step.finish();
  }
}

TEST_F(ChunkTest, NumbersBelowZeroAndChunksThatTheStepHasHad) {
  const Step step = engine_.step();
  EXPECT_THROWS(UsageError, "got stage -1, microbatch 0; stages and microbatches are numbered from 0",
                (void)engine_.chunk({-1, 0}));
  EXPECT_THROWS(UsageError, "got stage 0, microbatch -2", (void)engine_.chunk({0, -2}));
  Chunk open = engine_.chunk({1, 2});
  EXPECT_THROWS(UsageError, "has had stage 1, microbatch 2 already", (void)engine_.chunk({1, 2}));
  open.finish();
  EXPECT_THROWS(UsageError, "has had stage 1, microbatch 2 already", (void)engine_.chunk({1, 2}));
  engine_.chunk({2, 1}).finish();  // no call is in it
}

TEST_F(ChunkTest, AnotherThread) {
  Step step = engine_.step();
  std::optional<Chunk> chunk(engine_.chunk({0, 0}));
  std::vector<std::string> messages;
  std::thread([&] {
    messages.push_back(message_of<UsageError>([&] { (void)engine_.chunk({0, 1}); }));
    messages.push_back(message_of<UsageError>([&] { chunk->resume(); }));
    messages.push_back(message_of<UsageError>([&] { chunk->finish(); }));
    ExpectedWarnings warnings;
    chunk.reset();
    messages.push_back(warnings.take().at(0));
  }).join();
  for (const std::string& message : messages) {
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "on another thread than", message);
  }
  EXPECT_THROWS(UsageError, "a chunk was open (stage 0, microbatch 0)", step.finish());
  expect_usable(engine_);
}

TEST_F(ChunkTest, OpenAtTheEndOfItsStep) {
  Step step = engine_.step();
  Chunk first = engine_.chunk({0, 3});
  Chunk second = engine_.chunk({1, 3});
  EXPECT_THROWS(UsageError, "a chunk was open (stage 0, microbatch 3; stage 1, microbatch 3); end each chunk",
                step.finish());
  EXPECT_THROWS(UsageError, "or whose step has", first.resume());
  EXPECT_THROWS(UsageError, "after its step", first.finish());
  first.finish();  // a second call does nothing
  {
    const Step next = engine_.step();
    const Chunk of_next = engine_.chunk({0, 3});
    EXPECT_THROWS(UsageError, "after its step", second.finish());
  }
  expect_usable(engine_);
}

TEST_F(ChunkTest, ThatHasEndedIsNotResumed) {
  const Step step = engine_.step();
  Chunk chunk = engine_.chunk({0, 0});
  Chunk moved(std::move(chunk));
  EXPECT_THROWS(UsageError, "a chunk that has ended", chunk.resume());
  chunk.finish();  // it was moved from
  moved.resume();
  moved.finish();
  EXPECT_THROWS(UsageError, "a chunk that has ended", moved.resume());
}

TEST_F(ChunkTest, InsideOfACallOrOfACapture) {
  OffloadEngine engine(model_, Options(device_).graph("bad"));
  const auto begins_chunk = [&engine](const at::Tensor& x) {
    engine.chunk({0, 0}).finish();
    return x * 2;
  };
  const auto bad = owning(begins_chunk);
  {
    const Step step = engine.step();
    EXPECT_THROWS(UsageError, "inside of a graphed call", (void)call("bad", bad, rows(0, device_)));
  }
  const auto body = owning([begins_chunk](const Tensors& in) { return Tensors{begins_chunk(in[0])}; });
  const std::vector<std::vector<Sample>> samples = {{rows(0, device_)}};
  EXPECT_THROWS(UsageError, "inside a capture", (void)make_graphed_callables(engine, {Callable("bad", body)}, samples));
}

/// Forward and backward of two microbatches of two stages; the second stage's forwards come first.
std::vector<PipelineStep> some_order() {
  return {{1, 0, Kind::forward},  {0, 0, Kind::forward}, {1, 0, Kind::backward}, {0, 1, Kind::forward},
          {0, 0, Kind::backward}, {1, 2, Kind::forward}, {0, 1, Kind::backward}, {1, 2, Kind::backward}};
}

TEST_F(ChunkTest, AnotherOrderThanTheStepWasGiven) {
  {
    const auto step = engine_.step(some_order());
    EXPECT_THROWS(UsageError, "expected forward of stage 1, microbatch 0; got stage 0, microbatch 1, which comes later",
                  (void)engine_.chunk({0, 1}));
    EXPECT_THROWS(UsageError, "expected forward of stage 1, microbatch 0; got stage 1, microbatch 1, which is not in",
                  (void)engine_.chunk({1, 1}));
    engine_.chunk({1, 0}).finish();
    EXPECT_THROWS(UsageError, "expected forward of stage 0, microbatch 0; got stage 1, microbatch 0, which this step",
                  (void)engine_.chunk({1, 0}));
    engine_.chunk({0, 0}).finish();
    engine_.chunk({0, 1}).finish();
    engine_.chunk({1, 2}).finish();
    EXPECT_THROWS(UsageError, "expected no further forward; got stage 0, microbatch 7, which is not in",
                  (void)engine_.chunk({0, 7}));
  }
  expect_usable(engine_);  // without an order
}

TEST_F(ChunkTest, ChunksThatDidNotCome) {
  Step step = engine_.step(some_order());
  engine_.chunk({1, 0}).finish();
  engine_.chunk({0, 0}).finish();
  EXPECT_THROWS(UsageError, "missing: stage 0, microbatch 1; stage 1, microbatch 2)", step.finish());
  Step many = engine_.step(pipeline_order({1, 1, 12}, 0));
  EXPECT_THROWS(UsageError, "stage 0, microbatch 7 and 4 more)", many.finish());
  EXPECT_EQ(engine_.report().steps, 1) << "that of the fixture";
  try {  // what ends the step says more
    const Step left = engine_.step(some_order());
    const Chunk chunk = engine_.chunk({1, 0});
    throw std::runtime_error("the trainer's");
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "the trainer's");
  }
  expect_usable(engine_);
}

TEST_F(ChunkTest, OrdersThatNoStepCanTake) {
  const std::vector<std::pair<std::vector<PipelineStep>, std::string>> bad = {
      {{{0, 0, Kind::forward}, {0, 1, Kind::forward}, {0, 0, Kind::forward}},
       "has the forward of stage 0, microbatch 0 twice"},
      {{{0, 0, Kind::forward}, {0, 0, Kind::backward}, {0, 0, Kind::backward}},
       "has the backward of stage 0, microbatch 0 twice"},
      {{{2, 1, Kind::backward}, {2, 1, Kind::forward}},
       "has the backward of stage 2, microbatch 1 before the forward of stage 2, microbatch 1"},
      {{{0, 0, Kind::forward}, {0, 1, Kind::backward}},
       "has the backward of stage 0, microbatch 1, but not the forward"},
      {{{0, 0, Kind::forward}, {0, 0, Kind::weight_gradients}, {0, 0, Kind::backward}},
       "has the weight gradients of stage 0, microbatch 0 before the backward"},
      {{{0, 0, Kind::forward}, {0, 0, Kind::backward}, {0, 0, Kind::weight_gradients}, {0, 0, Kind::weight_gradients}},
       "has the weight gradients of stage 0, microbatch 0 twice"},
      {{{0, 0, Kind::forward}, {0, 0, Kind::weight_gradients}}, "microbatch 0, but not the backward of stage 0"},
      {{{0, 0, Kind::forward},
        {0, 0, Kind::backward},
        {0, 1, Kind::forward},
        {0, 1, Kind::backward},
        {0, 0, Kind::weight_gradients}},
       "the order never computes the weight gradients of stage 0, microbatch 1, but delays others; add them as a step"},
      {{{0, -1, Kind::forward}}, "stage 0, microbatch -1; stages and microbatches are numbered from 0"},
  };
  for (const auto& each : bad) {
    EXPECT_THROWS(UsageError, each.second, (void)engine_.step(each.first));
    EXPECT_THROWS(UsageError, each.second, (void)engine_.step(each.first)) << "it is not taken for the order of a step";
    EXPECT_THROWS(UsageError, "outside of a step", (void)engine_.chunk({0, 0})) << "no step has begun";
  }
  engine_.step(std::vector<PipelineStep>()).finish();
  expect_usable(engine_);
}

TEST_F(ChunkTest, TheReportCountsWhatEachChunkOffloads) {
  OffloadEngine engine(model_, Options(device_).min_bytes(256).offload("**"));
  const auto save = [&](std::int64_t squares) {
    at::Tensor sum = at::zeros({}, device_);
    for (std::int64_t i = 0; i < squares; ++i) {
      const OffloadScope scope("squares");
      sum = sum + rows(i, device_).requires_grad_().mul(2).square().sum();
    }
    return sum;
  };
  const auto bytes = static_cast<std::int64_t>(rows(0, device_).nbytes());
  for (int s = 0; s < 3; ++s) {
    Step step = engine.step();
    Chunk outer = engine.chunk({0, 1});
    at::Tensor loss = save(1);
    Chunk inner = engine.chunk({3, 0});
    loss = loss + save(3);
    outer.resume();
    loss = loss + save(1);
    inner.resume();
    loss = loss + save(1);
    inner.finish();
    loss = loss + save(5);  // the outer chunk's
    outer.finish();
    loss = loss + save(7);  // of no chunk
    loss.backward();
    step.finish();
    const std::vector<ChunkReport> chunks = engine.report().chunks;
    ASSERT_EQ(chunks.size(), 2U);
    EXPECT_EQ(chunks[0].microbatch, 1);
    EXPECT_EQ(chunks[1].stage, 3);
    if (s == 0) {  // later steps keep on the device what backward needs at once
      EXPECT_EQ(chunks[0].offloaded_bytes, 7 * bytes);
      EXPECT_EQ(chunks[1].offloaded_bytes, 4 * bytes);
      EXPECT_EQ(engine.report().offloaded_bytes, 18 * bytes);
    }
  }
  engine.step().finish();
  EXPECT_TRUE(engine.report().chunks.empty());
}

TEST_F(ChunkTest, StepsLikeTheStepBeforeTakeNothingFromTheHeap) {
  const std::vector<PipelineStep> order = pipeline_order({2, 2, 8}, 0);
  for (int s = 0; s < 6; ++s) {
    const Step step = s % 2 == 0 ? engine_.step(order) : engine_.step();
    const std::int64_t before = heap_allocations_of_this_thread();
    for (const PipelineStep& work : order) {
      if (work.kind == Kind::forward) {
        Chunk chunk = engine_.chunk({work.stage, work.microbatch});
        chunk.resume();
        chunk.finish();
      }
    }
    EXPECT_TRUE(s == 0 || heap_allocations_of_this_thread() == before) << "step " << s;
  }
}

}  // namespace
}  // namespace sidestream::testing_model
