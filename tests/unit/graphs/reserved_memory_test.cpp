// What graphed layers reserve of the device against the same layers run eagerly, to the byte.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

#include "graphs/outputs/storage_holders.h"
#include "models/plain_twin.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/pipeline_order.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream::testing_model {
namespace {

constexpr std::int64_t kRipples = 2;
constexpr std::int64_t kRippleElements = 5 << 19;  // a tensor is a segment of its own
constexpr std::int64_t kRippleBytes = kRippleElements * static_cast<std::int64_t>(sizeof(float));

struct Ripple : torch::nn::Module {
  Ripple(bool scaled, bool longer) : longer(longer) {
    if (scaled) {
      scale = register_parameter("scale", at::full({1}, 0.5));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = (scale.defined() ? x * scale : x).exp();
    return (longer ? h.tanh() : h).abs() + x;
  }

  at::Tensor scale;
  bool longer;  ///< saves a tensor more, which the gradient of `scale` is not computed from
};

class RippleStack : public torch::nn::Module {
 public:
  explicit RippleStack(bool scaled = false, bool longer = false) {
    for (std::int64_t i = 0; i < kRipples; ++i) {
      ripples_->push_back(Ripple(scaled, longer));
    }
    register_module("ripples", ripples_);
  }
  at::Tensor forward(at::Tensor h) {
    for (std::size_t i = 0; i < ripples_->size(); ++i) {
      h = graphed.empty() ? call(&ripples_->at<Ripple>(i), h) : graphed[i]({h})[0];
    }
    return h;
  }
  /// The ripples, each with the output of the one before.
  void capture(OffloadEngine& engine, c10::Device device, const GraphOptions& options) {
    std::vector<Callable> callables;
    std::vector<std::vector<Sample>> samples;
    for (std::size_t i = 0; i < ripples_->size(); ++i) {
      callables.emplace_back(
          "ripples." + std::to_string(i),
          [](Ripple& ripple, const Tensors& in) -> Tensors { return {ripple.forward(in[0])}; },
          ripples_->ptr<Ripple>(i));
      samples.push_back({i == 0 ? Sample(at::zeros(kRippleElements).to(device).requires_grad_(true))
                                : Sample::output_of(static_cast<std::int64_t>(i) - 1)});
    }
    graphed = make_graphed_callables(engine, std::move(callables), samples, options);
  }
  std::vector<GraphedCallable> graphed;  ///< empty: calls

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

enum class Way : std::uint8_t { eager, in_order, in_slots, callables };

/// The same for the first rank of a pipeline, which runs its layers in `order`. If weight gradients are steps of the order, layers have
/// weights. `in_slots`: steps are not told the order, so each microbatch in flight has captures of its own.
ReservedPeak train_rank_of_ripples(c10::Device device, Way way, const std::vector<PipelineStep>& order,
                                   bool longer = false) {
  const bool delayed = std::any_of(order.begin(), order.end(), [](const PipelineStep& work) {
    return work.kind == PipelineStep::Kind::weight_gradients;
  });
  RippleStack model(delayed, longer);
  model.to(device);
  await_end_of_backward(device);  // of the test before: it would be freed meanwhile
  synchronize(device);
  release_cached_memory(device);
  const std::int64_t before = memory_use(device).reserved;
  const GraphOptions graph_options =
      GraphOptions().gradients("**", delayed ? GradientPolicy::delayed : GradientPolicy::cloned);
  std::optional<OffloadEngine> engine;
  if (way == Way::callables) {
    engine.emplace(model, Options(device));
    model.capture(*engine, device, GraphOptions(graph_options).order(order).num_warmup_iters(0));
  } else if (way != Way::eager) {
    engine.emplace(model, Options(device).graph("ripples.*").graph_options(graph_options));
  }
  ReservedPeak result;
  const auto pass = [&] {
    std::map<std::int64_t, at::Tensor> inputs;
    std::map<std::int64_t, at::Tensor> outputs;
    for (const PipelineStep& work : order) {
      const std::int64_t m = work.microbatch;
      if (work.kind == PipelineStep::Kind::forward) {
        inputs[m] = at::linspace(-1, 1 + work.microbatch, kRippleElements).to(device).requires_grad_(true);
        const std::optional<Chunk> chunk = chunk_of(engine ? &*engine : nullptr, {work.stage, work.microbatch});
        outputs[m] = model.forward(inputs[m]);
      } else if (work.kind == PipelineStep::Kind::weight_gradients) {
        if (engine) {
          engine->backward_dw({work.stage, work.microbatch});
        }
      } else {
        outputs[m].backward(at::linspace(2, 3, kRippleElements).to(device));
        result.gradient = inputs[m].grad().cpu();
        inputs[m] = outputs[m] = at::Tensor();
      }
    }
  };
  const auto step = [&] {
    if (engine) {
      Step in_order = way == Way::in_slots ? engine->step() : engine->step(order);
      pass();
      in_order.finish();
    } else {
      pass();
    }
  };
  result.bytes = peak_of_later_steps(device, step) - before;
  if (engine) {
    EXPECT_EQ(engine->report().replays, kRipples * static_cast<std::int64_t>(order.size()));
  }
  return result;
}

TEST(ReservedMemoryTest, AnOrderTakesWhatIsLiveInIt) {
  const sim::OneThread one_thread;
  const c10::Device device = find_device("sim");
  const std::vector<PipelineStep> order = pipeline_order({3, 1, 4}, 0);  // three microbatches are in flight
  const ReservedPeak eager = train_rank_of_ripples(device, Way::eager, order);
  const ReservedPeak in_order = train_rank_of_ripples(device, Way::in_order, order);
  const ReservedPeak callables = train_rank_of_ripples(device, Way::callables, order);
  EXPECT_TRUE(at::equal(in_order.gradient, eager.gradient));
  EXPECT_TRUE(at::equal(callables.gradient, eager.gradient));
  // Its own copy of each input in flight, the gradient of an output, and that of an input.
  EXPECT_EQ(in_order.bytes - eager.bytes, 5 * kRippleBytes);
  EXPECT_EQ(callables.bytes, in_order.bytes);
}

TEST(ReservedMemoryTest, WithoutAnOrderSlotsTakeAChainEach) {
  const sim::OneThread one_thread;
  const c10::Device device = find_device("sim");
  const std::vector<PipelineStep> one_at_a_time = pipeline_order({1, 1, 4}, 0);
  const std::vector<PipelineStep> three = pipeline_order({3, 1, 4}, 0);
  const ReservedPeak chain = train_rank_of_ripples(device, Way::in_slots, one_at_a_time);
  const ReservedPeak slots = train_rank_of_ripples(device, Way::in_slots, three);
  const ReservedPeak in_order = train_rank_of_ripples(device, Way::in_order, three);
  EXPECT_TRUE(at::equal(slots.gradient, in_order.gradient));
  EXPECT_EQ(slots.bytes, 3 * chain.bytes - 2 * kRippleBytes) << "the gradient of an output is there once";
  EXPECT_LT(in_order.bytes, slots.bytes);
}

TEST(ReservedMemoryTest, DelayedWeightGradientsHoldMemoryUntilTheirPlaceInTheOrder) {
  const sim::OneThread one_thread;
  const c10::Device device = find_device("sim");
  PipelineShape shape{3, 1, 4};  // three microbatches are in flight: F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3
  shape.delay_weight_gradients = true;
  const std::vector<PipelineStep> order = pipeline_order(shape, 0);
  std::vector<PipelineStep> last = order;
  std::stable_partition(last.begin(), last.end(),
                        [](const PipelineStep& work) { return work.kind != PipelineStep::Kind::weight_gradients; });
  const ReservedPeak in_order = train_rank_of_ripples(device, Way::in_order, order);
  const ReservedPeak at_end = train_rank_of_ripples(device, Way::in_order, last);
  const ReservedPeak callables = train_rank_of_ripples(device, Way::callables, order);
  EXPECT_TRUE(at::equal(in_order.gradient, at_end.gradient));
  EXPECT_TRUE(at::equal(callables.gradient, in_order.gradient));
  EXPECT_LT(in_order.bytes, at_end.bytes);
  EXPECT_EQ(callables.bytes, in_order.bytes);
}

TEST(ReservedMemoryTest, WhatOnlyABackwardReadsIsNotHeldForDelayedWeightGradients) {
  const sim::OneThread one_thread;
  const c10::Device device = find_device("sim");
  std::vector<PipelineStep> order;  // F0 B0 F1 B1 F2 B2 F3 B3 W0 W1 W2 W3
  for (const auto kind : {PipelineStep::Kind::forward, PipelineStep::Kind::weight_gradients}) {
    for (std::int64_t m = 0; m < 4; ++m) {
      order.push_back({0, m, kind});
      if (kind == PipelineStep::Kind::forward) {
        order.push_back({0, m, PipelineStep::Kind::backward});
      }
    }
  }
  const ReservedPeak ripples = train_rank_of_ripples(device, Way::in_order, order);
  const ReservedPeak longer = train_rank_of_ripples(device, Way::in_order, order, /*longer=*/true);
  EXPECT_LE(longer.bytes - ripples.bytes, kRipples * kRippleBytes) << "those of one microbatch at most";
}

}  // namespace
}  // namespace sidestream::testing_model
