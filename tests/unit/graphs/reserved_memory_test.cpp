// What graphed layers reserve of the device against the same layers run eagerly, to the byte.
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

#include "models/plain_twin.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/pipeline_order.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream::testing_model {
namespace {

constexpr std::int64_t kRipples = 2;
constexpr std::int64_t kRippleElements = 5 << 19;  // a tensor is a segment of its own
constexpr std::int64_t kRippleBytes = kRippleElements * static_cast<std::int64_t>(sizeof(float));

struct Ripple : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x.exp().abs() + x; }
};

class RippleStack : public torch::nn::Module {
 public:
  RippleStack() {
    for (std::int64_t i = 0; i < kRipples; ++i) {
      ripples_->push_back(Ripple());
    }
    register_module("ripples", ripples_);
  }
  at::Tensor forward(at::Tensor h) {
    for (const auto& ripple : *ripples_) {
      h = call(ripple->as<Ripple>(), h);
    }
    return h;
  }

 private:
  torch::nn::ModuleList ripples_;
};

struct ReservedPeak {
  std::int64_t bytes = 0;  ///< at the peak of a later step, above what was there before
  at::Tensor gradient;     ///< of the input
};

/// The most that is reserved in steps behind the sizing and the captures.
std::int64_t peak_of_later_steps(c10::Device device, const std::function<void()>& step) {
  for (int s = 0; s < 3; ++s) {
    step();
  }
  synchronize(device);
  release_cached_memory(device);
  reset_memory_peaks(device);
  step();
  return memory_use(device).reserved_peak;
}

/// Steps as a trainer makes them that owns the input and the gradient of the output.
ReservedPeak train_ripples(c10::Device device, bool graphs) {
  RippleStack model;
  at::Tensor x = at::linspace(-1, 1, kRippleElements).to(device).requires_grad_(true);
  const at::Tensor of_output = at::linspace(2, 3, kRippleElements).to(device);
  synchronize(device);
  release_cached_memory(device);
  const std::int64_t before = memory_use(device).reserved;
  std::optional<OffloadEngine> engine;
  if (graphs) {
    engine.emplace(model, Options(device).graph("ripples.*"));
  }
  ReservedPeak result;
  const auto step = [&] {
    in_step(engine ? &*engine : nullptr, [&] { model.forward(x).backward(of_output); });
    result.gradient = x.grad().cpu();
    x.mutable_grad() = at::Tensor();
  };
  result.bytes = peak_of_later_steps(device, step) - before;
  if (engine) {
    EXPECT_EQ(engine->report().replays, 2 * kRipples);
  }
  return result;
}

TEST(ReservedMemoryTest, LayersInGraphsTakeAnInputAndAnOutputsGradientMore) {
  const sim::OneThread one_thread;
  const c10::Device device = find_device("sim");
  const ReservedPeak eager = train_ripples(device, false);
  const ReservedPeak graphs = train_ripples(device, true);
  EXPECT_TRUE(at::equal(graphs.gradient, eager.gradient));
  EXPECT_EQ(graphs.bytes - eager.bytes, 2 * kRippleBytes);
}

/// The same for the first of three ranks of a pipeline: of four microbatches, three are in flight.
constexpr std::int64_t kInFlight = 3;
ReservedPeak train_rank_of_ripples(c10::Device device, bool graphs) {
  constexpr std::int64_t kMicrobatches = kInFlight + 1;
  const std::vector<PipelineStep> order = pipeline_order({kInFlight, 1, kMicrobatches}, 0);
  RippleStack model;
  synchronize(device);
  release_cached_memory(device);
  const std::int64_t before = memory_use(device).reserved;
  std::optional<OffloadEngine> engine;
  if (graphs) {
    engine.emplace(model, Options(device).graph("ripples.*"));
  }
  ReservedPeak result;
  const auto pass = [&] {
    std::array<at::Tensor, kMicrobatches> inputs;
    std::array<at::Tensor, kMicrobatches> outputs;
    for (const PipelineStep& work : order) {
      const auto m = static_cast<std::size_t>(work.microbatch);
      if (work.kind == PipelineStep::Kind::forward) {
        inputs[m] = at::linspace(-1, 1 + work.microbatch, kRippleElements).to(device).requires_grad_(true);
        std::optional<Chunk> chunk;
        if (engine) {
          chunk.emplace(engine->chunk({work.stage, work.microbatch}));
        }
        outputs[m] = model.forward(inputs[m]);
      } else {
        outputs[m].backward(at::linspace(2, 3, kRippleElements).to(device));
        result.gradient = inputs[m].grad().cpu();
        inputs[m] = outputs[m] = at::Tensor();
      }
    }
  };
  const auto step = [&] {
    if (engine) {
      Step in_order = engine->step(order);
      pass();
      in_order.finish();
    } else {
      pass();
    }
  };
  result.bytes = peak_of_later_steps(device, step) - before;
  if (engine) {
    EXPECT_EQ(engine->report().replays, 2 * kRipples * kMicrobatches);
  }
  return result;
}

TEST(ReservedMemoryTest, AnOrderTakesWhatIsLiveInIt) {
  const sim::OneThread one_thread;
  const c10::Device device = find_device("sim");
  const ReservedPeak eager = train_rank_of_ripples(device, false);
  const ReservedPeak graphs = train_rank_of_ripples(device, true);
  EXPECT_TRUE(at::equal(graphs.gradient, eager.gradient));
  // Its own copy of each input in flight, the gradient of an output, and that of an input.
  EXPECT_EQ(graphs.bytes - eager.bytes, (kInFlight + 2) * kRippleBytes);
}

}  // namespace
}  // namespace sidestream::testing_model
