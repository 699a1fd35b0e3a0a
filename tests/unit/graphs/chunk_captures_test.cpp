// Which captures the calls of a chunk replay in, if several chunks are in flight.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/engine.h"
#include "unit/graphs/called_stack.h"
#include "unit/graphs/chunk_fixture.h"
#include "warnings.h"

namespace sidestream::testing_model {
namespace {

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
    expect_same_step(model_, &engine, plain_, s,
                     [&](CalledStack& model) { overtake(model, &model == &model_ ? &engine : nullptr, s, device_); });
  }
  EXPECT_EQ(engine.report().captures, 8) << "two microbatches of two layers";
  EXPECT_EQ(engine.report().eager_calls, 4) << "those of the first step";
  EXPECT_EQ(engine.report().order_findings, std::vector<std::string>());
  OffloadEngine without(model_, options());
  for (std::int64_t s = 0; s < 5; ++s) {  // autograd connects the layers of a microbatch
    expect_same_step(model_, &without, plain_, s, [&](CalledStack& model) { overtake(model, nullptr, s, device_); });
  }
  EXPECT_EQ(without.report().eager_calls, 4) << "those of the first step";
}

TEST_F(ChunkTest, ACallThatRunsTwiceInAChunk) {
  OffloadEngine engine_of_chunks(model_, options());
  const auto run = [&](CalledStack& model, OffloadEngine* engine, std::int64_t s) {
    std::vector<at::Tensor> losses;
    for (std::int64_t m = 0; m < 2; ++m) {
      const std::optional<Chunk> chunk = chunk_of(engine, {0, m});
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
    expect_same_step(model_, &engine_of_chunks, plain_, s,
                     [&](CalledStack& model) { run(model, &model == &model_ ? &engine_of_chunks : nullptr, s); });
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
      const std::optional<Chunk> chunk = chunk_of(of, {0, m});
      const at::Tensor h = model.run_layer(0, rows(s, device_, m).requires_grad_(true)) * 2;
      losses.push_back((s < 2 ? model.run_layer(0, h) : h).square().mean());
    }
    for (const at::Tensor& loss : losses) {  // the first chunk's backward is the first
      loss.backward();
    }
  };
  std::int64_t eager = 0;
  for (std::int64_t s = 0; s < 5; ++s) {
    expect_same_step(model_, &engine, plain_, s,
                     [&](CalledStack& model) { run(model, &model == &model_ ? &engine : nullptr, s); });
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
        const std::optional<Chunk> chunk = chunk_of(of, {stage, 0});
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
    expect_same_step(model_, &engine, plain_, s,
                     [&](CalledStack& model) { run(model, &model == &model_ ? &engine : nullptr, s); });
  }
}

class SkippedLayerTest : public ChunkTest, public testing::WithParamInterface<OnPending> {};

/// Three microbatches are in flight. At first the second layer is for the first of them, later for the last.
TEST_P(SkippedLayerTest, ALayerThatOnlySomeChunksHave) {
  OffloadEngine engine(model_, options().call_options(CallOptions().on_pending(GetParam())));
  const auto run = [&](CalledStack& model, OffloadEngine* of, std::int64_t s) {
    std::vector<at::Tensor> losses;
    for (std::int64_t m = 0; m < 3; ++m) {
      const std::optional<Chunk> chunk = chunk_of(of, {0, m});
      const at::Tensor h = model.run_layer(0, rows(s, device_, m)) * 2;
      losses.push_back((m == (s < 2 ? 0 : 2) ? model.run_layer(1, h) : h).square().mean());
    }
    for (; !losses.empty(); losses.pop_back()) {
      losses.back().backward();
    }
  };
  for (std::int64_t s = 0; s < 5; ++s) {
    expect_same_step(model_, &engine, plain_, s,
                     [&](CalledStack& model) { run(model, &model == &model_ ? &engine : nullptr, s); });
  }
  // Those of the first step, and by default the one that gets a capture for its chunk. Without new captures it takes the one there is.
  EXPECT_EQ(engine.report().eager_calls, GetParam() == OnPending::capture ? 5 : 4);
}

INSTANTIATE_TEST_SUITE_P(Rules, SkippedLayerTest, testing::Values(OnPending::capture, OnPending::error));

/// The engine has learned another order, without chunks.
TEST_F(ChunkTest, BeginInALaterStep) {
  for (std::int64_t s = 0; s < 6; ++s) {
    expect_same_step(model_, &engine_, plain_, s, [&](CalledStack& model) {
      if (s < 2) {
        model.forward(rows(s, device_)).square().mean().backward();
      } else {
        overtake(model, &model == &model_ ? &engine_ : nullptr, s, device_);
      }
    });
    EXPECT_EQ(engine_.report().order_findings, std::vector<std::string>());
  }
}

}  // namespace
}  // namespace sidestream::testing_model
