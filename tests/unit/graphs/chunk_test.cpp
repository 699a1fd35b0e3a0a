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
#include "models/plain_twin.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/owning.h"
#include "sidestream/pipeline_order.h"
#include "sidestream/scope.h"
#include "unit/graphs/called_stack.h"
#include "unit/graphs/counted_heap.h"
#include "warnings.h"

namespace sidestream::testing_model {
namespace {

using Kind = PipelineStep::Kind;

class ChunkTest : public testing::Test {
 protected:
  ChunkTest() {
    in_step(&engine_, [&] { model_.forward(rows(0, device_)).square().mean().backward(); });
  }
  [[nodiscard]] Options options() const {
    return Options(device_).min_bytes(256).graph("layers.*").offload("layers.*.*").check_steps(8);
  }
  /// A step of the engine that a bad chunk has been part of gives plain gradients.
  void expect_usable(OffloadEngine& engine) {
    for (std::int64_t s = 20; s < 23; ++s) {
      expect_same_step(model_, nullptr, plain_, s, [&](CalledStack& model) {
        std::optional<Step> step;
        std::optional<Chunk> chunk;
        if (&model == &model_) {
          step.emplace(engine.step());
          chunk.emplace(engine.chunk({0, 0}));
        }
        model.forward(rows(s, device_)).square().mean().backward();
        chunk.reset();
        step.reset();
      });
    }
  }

  c10::Device device_ = find_device("sim");
  CalledStack model_{device_};
  CalledStack plain_{device_};
  OffloadEngine engine_{model_, options()};  // has had one step
};

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
  for (const auto& [order, message] : bad) {
    EXPECT_THROWS(UsageError, message, (void)engine_.step(order));
    EXPECT_THROWS(UsageError, message, (void)engine_.step(order)) << "it is not taken for the order of a step";
    EXPECT_THROWS(UsageError, "outside of a step", (void)engine_.chunk({0, 0})) << "no step has begun";
  }
  engine_.step(std::vector<PipelineStep>()).finish();
  expect_usable(engine_);
}

/// The forwards of two microbatches, one inside of the other; other work lies between the layers, so no input tells where it comes from.
void overtake(CalledStack& model, OffloadEngine* engine, std::int64_t s, c10::Device device) {
  const auto begin = [&](std::int64_t microbatch) {
    return engine == nullptr ? std::optional<Chunk>() : std::optional<Chunk>(engine->chunk({0, microbatch}));
  };
  std::optional<Chunk> outer = begin(0);
  at::Tensor a = model.run_layer(0, rows(s, device));
  std::optional<Chunk> inner = begin(1);
  const at::Tensor b = model.run_layer(1, model.run_layer(0, rows(s, device, 1)) * 2);
  inner.reset();
  a = model.run_layer(1, a * 2);
  outer.reset();
  b.square().mean().backward();
  a.square().mean().backward();
}

TEST_F(ChunkTest, LayersOfOneChunkReplayInOneSequence) {
  OffloadEngine engine(model_, options());
  for (std::int64_t s = 0; s < 5; ++s) {
    const StepTensors given = train_step(model_, nullptr, [&] {
      const Step step = engine.step();
      overtake(model_, &engine, s, device_);
    });
    EXPECT_TRUE(same(given, train_step(plain_, nullptr, [&] { overtake(plain_, nullptr, s, device_); })));
  }
  EXPECT_EQ(engine.report().captures, 8) << "two microbatches of two layers";
  EXPECT_EQ(engine.report().eager_calls, 4) << "those of the first step";
  EXPECT_EQ(engine.report().order_findings, std::vector<std::string>());
  OffloadEngine without(model_, options());
  for (std::int64_t s = 0; s < 5; ++s) {  // autograd connects the layers of a microbatch
    const StepTensors given = train_step(model_, &without, [&] { overtake(model_, nullptr, s, device_); });
    EXPECT_TRUE(same(given, train_step(plain_, nullptr, [&] { overtake(plain_, nullptr, s, device_); })));
  }
  EXPECT_EQ(without.report().eager_calls, 4) << "those of the first step";
}

TEST_F(ChunkTest, ACallThatRunsTwiceInAChunk) {
  OffloadEngine engine_of_chunks(model_, options());
  const auto run = [&](CalledStack& model, OffloadEngine* engine, std::int64_t s) {
    std::vector<at::Tensor> losses;
    for (std::int64_t m = 0; m < 2; ++m) {
      std::optional<Chunk> chunk;
      if (engine != nullptr) {
        chunk.emplace(engine->chunk({0, m}));
      }
      const at::Tensor first = model.run_layer(0, rows(s, device_, m));
      const at::Tensor cut = first.detach().requires_grad_();
      const at::Tensor second = model.run_layer(0, cut);
      losses.push_back(second.square().mean());
      losses.push_back(first.sum());
    }
    for (const at::Tensor& loss : losses) {
      loss.backward();
    }
  };
  for (std::int64_t s = 0; s < 4; ++s) {
    const StepTensors given = train_step(model_, nullptr, [&] {
      const Step step = engine_of_chunks.step();
      run(model_, &engine_of_chunks, s);
    });
    EXPECT_TRUE(same(given, train_step(plain_, nullptr, [&] { run(plain_, nullptr, s); })));
  }
  EXPECT_EQ(engine_of_chunks.report().captures, 8);
  EXPECT_EQ(engine_of_chunks.report().eager_calls, 4);
}

/// At first one chunk runs a layer twice, later two chunks run it once each and are in flight together.
TEST_F(ChunkTest, CapturesOfOneChunkServeNoOtherChunkInFlight) {
  OffloadEngine engine(model_, options());
  const auto run = [&](CalledStack& model, OffloadEngine* of, std::int64_t s) {
    std::vector<at::Tensor> losses;
    for (std::int64_t m = 0; m < (s < 2 ? 1 : 2); ++m) {
      std::optional<Chunk> chunk;
      if (of != nullptr) {
        chunk.emplace(of->chunk({0, m}));
      }
      const at::Tensor h = model.run_layer(0, rows(s, device_, m).requires_grad_(true)) * 2;
      losses.push_back((s < 2 ? model.run_layer(0, h) : h).square().mean());
    }
    for (const at::Tensor& loss : losses) {  // the first chunk's backward is the first
      loss.backward();
    }
  };
  std::int64_t eager = 0;
  for (std::int64_t s = 0; s < 5; ++s) {
    const StepTensors given = train_step(model_, nullptr, [&] {
      const Step step = engine.step();
      run(model_, &engine, s);
    });
    EXPECT_TRUE(same(given, train_step(plain_, nullptr, [&] { run(plain_, nullptr, s); }))) << "step " << s;
    EXPECT_TRUE(s < 3 || engine.report().eager_calls == eager) << "step " << s << " ran calls eagerly";
    eager = engine.report().eager_calls;
  }
}

/// The capture of the second layer makes room for another shape, so the third layer's capture takes any input of its shape.
TEST_F(ChunkTest, ACaptureWhoseGiverWasDroppedServesNoOtherChunkInFlight) {
  const CallOptions calls = CallOptions().max_captures(1).on_max_captures(OnMaxCaptures::drop_least_used);
  OffloadEngine engine(model_, options().call_options(calls));
  const auto run = [&](CalledStack& model, OffloadEngine* of, std::int64_t s) {
    const at::Tensor x = rows(s, device_).requires_grad_(true);
    if (s < 2) {
      model.forward(x).square().mean().backward();
    } else if (s == 2) {
      model.run_layer(1, x.slice(0, 0, 2)).square().mean().backward();
    } else {
      std::vector<at::Tensor> losses;
      for (std::int64_t stage = 0; stage < 2; ++stage) {
        std::optional<Chunk> chunk;
        if (of != nullptr) {
          chunk.emplace(of->chunk({stage, 0}));
        }
        const at::Tensor h = stage == 0 ? model.run_layer(0, x) : model.run_layer(2, model.run_layer(1, x));
        losses.push_back(h.square().mean());
      }
      for (const at::Tensor& loss : losses) {
        loss.backward();
      }
    }
  };
  const ExpectedWarnings of_the_bound;
  for (std::int64_t s = 0; s < 6; ++s) {
    const StepTensors given = train_step(model_, nullptr, [&] {
      const Step step = engine.step();
      run(model_, &engine, s);
    });
    EXPECT_TRUE(same(given, train_step(plain_, nullptr, [&] { run(plain_, nullptr, s); }))) << "step " << s;
  }
}

class SkippedLayerTest : public ChunkTest, public testing::WithParamInterface<OnPending> {};

/// Three microbatches are in flight. At first the second layer is for the first of them, later for the last.
TEST_P(SkippedLayerTest, ALayerThatOnlySomeChunksHave) {
  OffloadEngine engine(model_, options().call_options(CallOptions().on_pending(GetParam())));
  const auto run = [&](CalledStack& model, OffloadEngine* of, std::int64_t s) {
    std::vector<at::Tensor> losses;
    for (std::int64_t m = 0; m < 3; ++m) {
      std::optional<Chunk> chunk;
      if (of != nullptr) {
        chunk.emplace(of->chunk({0, m}));
      }
      const at::Tensor h = model.run_layer(0, rows(s, device_, m)) * 2;
      losses.push_back((m == (s < 2 ? 0 : 2) ? model.run_layer(1, h) : h).square().mean());
    }
    for (; !losses.empty(); losses.pop_back()) {
      losses.back().backward();
    }
  };
  for (std::int64_t s = 0; s < 5; ++s) {
    const StepTensors given = train_step(model_, nullptr, [&] {
      const Step step = engine.step();
      run(model_, &engine, s);
    });
    EXPECT_TRUE(same(given, train_step(plain_, nullptr, [&] { run(plain_, nullptr, s); }))) << "step " << s;
  }
  // Those of the first step, and by default the one that gets a capture for its chunk. Without new captures it takes the one there is.
  EXPECT_EQ(engine.report().eager_calls, GetParam() == OnPending::capture ? 5 : 4);
}

INSTANTIATE_TEST_SUITE_P(Rules, SkippedLayerTest, testing::Values(OnPending::capture, OnPending::error));

/// The engine has learned another order, without chunks.
TEST_F(ChunkTest, BeginInALaterStep) {
  for (std::int64_t s = 0; s < 6; ++s) {
    const StepTensors given = train_step(model_, nullptr, [&] {
      const Step step = engine_.step();
      if (s < 2) {
        model_.forward(rows(s, device_)).square().mean().backward();
      } else {
        overtake(model_, &engine_, s, device_);
      }
    });
    const StepTensors plainly = train_step(plain_, nullptr, [&] {
      if (s < 2) {
        plain_.forward(rows(s, device_)).square().mean().backward();
      } else {
        overtake(plain_, nullptr, s, device_);
      }
    });
    EXPECT_TRUE(same(given, plainly)) << "step " << s;
    EXPECT_EQ(engine_.report().order_findings, std::vector<std::string>());
  }
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
