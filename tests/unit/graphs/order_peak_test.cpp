// The peak of live memory of a rank's order against what its plan says beforehand, to the byte.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

#include "analysis/copy_places.h"
#include "analysis/sequence_order.h"
#include "models/plain_twin.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/pipeline_order.h"
#include "sim/device/state.h"
#include "sim/rerun/cost.h"
#include "sim/rerun/recording.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream::testing_model {
namespace {

using Kind = PipelineStep::Kind;
using ChunkNumbers = std::pair<std::int64_t, std::int64_t>;  // stage and microbatch

constexpr std::int64_t kStages = 2;
constexpr std::int64_t kMicrobatches = 16;
constexpr std::int64_t kLayers = 3;  // of a stage
constexpr std::int64_t kElements = 512;
constexpr std::int64_t kTensor = kElements * static_cast<std::int64_t>(sizeof(float));
constexpr std::int64_t kBlock = 512;  // of the device's allocator
constexpr CopyWindow kWindow{6 * kTensor, 3 * kTensor};

/// As CopyLimits has it: a layer saves two tensors at most.
constexpr CopyWindow few_in_flight(std::uint64_t calls) {
  return {std::min<std::uint64_t>(kWindow.lag, (calls + 1) * 2 * kTensor), kWindow.lookahead, calls};
}

/// Saves its input, which may be an earlier layer's output, and a tensor of its own. Its forward needs eight tensors at once besides its
/// input: four, and what they are stacked to. Its backward needs fewer.
class Stacking : public torch::nn::Module {
 public:
  explicit Stacking(c10::Device device)
      : weight_(register_parameter("weight", at::linspace(0.01, 0.05, kElements).to(device))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor grown = (x * weight_).exp();
    const at::Tensor stacked = at::stack({grown, grown + 1, grown + 2, grown + 3});
    return stacked.sum(0);
  }

 private:
  at::Tensor weight_;
};
constexpr std::int64_t kForward = 8;
constexpr std::int64_t kBackward = 4;

/// The first of four ranks.
class FirstRank : public torch::nn::Module {
 public:
  explicit FirstRank(c10::Device device) {
    for (std::int64_t i = 0; i < kStages * kLayers; ++i) {
      layers_->push_back(std::make_shared<Stacking>(device));
    }
    register_module("layers", layers_);
    for (at::Tensor& parameter : parameters()) {
      parameter.mutable_grad() = at::zeros_like(parameter);
    }
    for (const PipelineStep& work : order) {
      const double number = 0.01 * static_cast<double>(work.stage * kMicrobatches + work.microbatch);
      inputs_[{work.stage, work.microbatch}] =
          at::linspace(-1, number, kElements).to(device).requires_grad_(work.stage > 0);
      of_outputs_[{work.stage, work.microbatch}] = at::linspace(1e-4, 2e-4 * (1 + number), kElements).to(device);
    }
  }
  /// A step. The trainer owns the inputs and the gradients of outputs, and reads an output before its backward. Gives those outputs and
  /// all gradients.
  StepTensors train_step(OffloadEngine* engine) {
    for (at::Tensor& parameter : parameters()) {
      parameter.mutable_grad().zero_();
    }
    std::vector<at::Tensor> given;
    std::map<ChunkNumbers, at::Tensor> outputs;
    const auto run = [&] {
      for (const PipelineStep& work : order) {
        const ChunkNumbers numbers(work.stage, work.microbatch);
        at::Tensor& input = inputs_[numbers];
        if (work.kind == Kind::forward) {
          const std::optional<Chunk> chunk = chunk_of(engine, {work.stage, work.microbatch});
          outputs[numbers] = forward(work.stage, input);
          continue;
        }
        given.push_back(outputs[numbers].clone().cpu());
        std::exchange(outputs[numbers], {}).backward(of_outputs_[numbers]);
        if (input.requires_grad()) {
          given.push_back(input.grad().cpu());
          input.mutable_grad() = at::Tensor();
        }
      }
    };
    if (engine != nullptr) {
      Step step = engine->step(order);
      run();
      step.finish();
    } else {
      run();
    }
    StepTensors all = gradients(*this);
    const StepTensors more = values(given);
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }

  const std::vector<PipelineStep> order = pipeline_order({4, kStages, kMicrobatches}, 0);

 private:
  at::Tensor forward(std::int64_t stage, at::Tensor h) {
    for (std::int64_t i = stage * kLayers; i < (stage + 1) * kLayers; ++i) {
      h = call(layers_[static_cast<std::size_t>(i)]->as<Stacking>(), h);
    }
    return h;
  }

  torch::nn::ModuleList layers_;
  std::map<ChunkNumbers, at::Tensor> inputs_;
  std::map<ChunkNumbers, at::Tensor> of_outputs_;
};

struct PlannedMemory {
  std::int64_t peak = 0;  ///< in the pool of the graphs
  std::int64_t offloaded = 0;
};

/// What the plan says of the rank before anything runs: the order of the graphs, and where copy_places puts their copies. Without a window
/// nothing is offloaded.
PlannedMemory planned(const std::vector<PipelineStep>& chunks, const std::optional<CopyWindow>& window) {
  std::vector<SequenceStep> steps;
  for (const PipelineStep& work : chunks) {
    const bool backward = work.kind == Kind::backward;
    const std::int64_t first = (work.stage * kMicrobatches + work.microbatch) * kLayers;
    for (std::int64_t i = 0; i < kLayers; ++i) {
      steps.push_back({static_cast<std::size_t>(first + (backward ? kLayers - 1 - i : i)), 0,
                       backward ? Direction::backward : Direction::forward});
    }
  }
  const SequenceOrder order(steps);
  const auto layer_of = [&](std::size_t run) {
    return static_cast<std::int64_t>(steps[order.forward_index(run)].call) % kLayers;
  };
  std::vector<std::uint64_t> bytes;  // without the input of a chunk, which stays
  for (std::size_t run = 0; run < order.runs(); ++run) {
    bytes.push_back(layer_of(run) > 0 ? 2 * kTensor : kTensor);
  }
  std::vector<std::uint64_t> offloaded(bytes.size());
  const std::vector<bool> stays = needed_immediately(order, bytes, window.value_or(kWindow));
  PlannedMemory memory;
  for (std::size_t run = 0; run < order.runs(); ++run) {
    offloaded[run] = window && !stays[run] ? bytes[run] : 0;
    memory.offloaded += static_cast<std::int64_t>(offloaded[run]);
  }
  const std::vector<CopyPlaces> places = copy_places(order, bytes, offloaded, window.value_or(kWindow));
  for (std::size_t i = 0; i < order.size(); ++i) {
    std::int64_t tensors = order.is_backward(i) ? kBackward : kForward;
    for (std::size_t run = 0; run < order.runs(); ++run) {
      const std::size_t forward = order.forward_index(run);
      if (i < forward || i > order.backward_index(run)) {
        continue;
      }
      const bool here = offloaded[run] == 0 || i < places[run].released_at || i >= places[run].reload_at;
      const bool is_first = layer_of(run) == 0;
      tensors += here || is_first ? 1 : 0;  // its input
      if (i > forward) {
        tensors += (here ? 1 : 0) + (layer_of(run) == kLayers - 1 ? 1 : 0);  // its own, and the chunk's output
      }
    }
    memory.peak = std::max(memory.peak, tensors * kTensor);
  }
  return memory;
}

using Blocks = std::set<const std::byte*>;

/// What tensors hold outside of the pools of graphs.
Blocks blocks_outside_of_graphs() {
  sim::Device::State& state = sim::Device::get().state();
  const std::lock_guard lock(state.mutex);
  Blocks blocks;
  state.memory.for_each_segment([&](const sim::Segment& segment) {
    for (const sim::Block* block = segment.first; block != nullptr && !segment.pool->is_private; block = block->next) {
      for (std::size_t at = 0; block->lent && at < block->requested; at += kBlock) {
        blocks.insert(block->begin + at);
      }
    }
  });
  return blocks;
}

/// The most bytes besides `outside` that hold at one moment of `cost` what work of that moment or later reads, or what work writes.
std::int64_t peak_of_values(const std::vector<sim::RecordedWork>& works, const Blocks& outside, const sim::Cost& cost) {
  const std::vector<sim::Span> spans = sim::simulate(works, cost).spans;
  std::vector<std::size_t> by_time(works.size());
  for (std::size_t i = 0; i < works.size(); ++i) {
    by_time[i] = i;
  }
  std::stable_sort(by_time.begin(), by_time.end(),
                   [&](std::size_t a, std::size_t b) { return spans[a].begin < spans[b].begin; });
  std::map<const std::byte*, sim::Span> values;  // by block: from its write to its latest use
  std::vector<std::pair<double, std::int64_t>> changes;
  const auto end = [&](const sim::Span& value) {
    changes.emplace_back(value.begin, kBlock);
    changes.emplace_back(value.end, -kBlock);
  };
  for (const std::size_t i : by_time) {
    for (const bool write : {false, true}) {
      for (const sim::Access& access : works[i].work->accesses) {
        if (works[i].work->kind == sim::Work::Kind::poison || access.write != write ||
            !sim::Device::get().owns(access.begin)) {
          continue;
        }
        for (std::size_t at = 0; at < access.bytes; at += kBlock) {
          const std::byte* const block = access.begin + at;
          if (outside.count(block) > 0) {
            continue;
          }
          const auto [value, is_first] = values.try_emplace(block, sim::Span{write ? spans[i].begin : 0, 0});
          if (write && !is_first) {
            end(value->second);
            value->second.begin = spans[i].begin;
          }
          value->second.end = spans[i].end;
        }
      }
    }
  }
  for (const auto& [block, value] : values) {
    end(value);
  }
  std::sort(changes.begin(), changes.end());
  std::int64_t now = 0;
  std::int64_t peak = 0;
  for (const auto& [time, change] : changes) {
    peak = std::max(peak, now += change);
  }
  return peak;
}

struct Window {
  const char* name;
  std::optional<CopyWindow> window;  ///< not set: nothing is offloaded
};

class OrderPeakTest : public testing::TestWithParam<Window> {};

// The plan is a bound that the order reaches: it holds no byte for nothing. The engine's count comes from its captures, the device's from
// the work that ran.
TEST_P(OrderPeakTest, IsWhatThePlanSays) {
  const sim::OneThread one_thread;
  const c10::Device device = find_device("sim");
  FirstRank model(device);
  FirstRank plain(device);
  const std::optional<CopyWindow>& window = GetParam().window;
  const PlannedMemory plan = planned(model.order, window);
  Options options = Options(device).graph("layers.*").min_bytes(1);
  if (window) {
    options.offload("layers.*").lag(kWindow.lag).lookahead(window->lookahead);
    if (window->in_flight < kMicrobatches) {
      options.groups_in_flight(static_cast<std::int64_t>(window->in_flight));
    }
  }
  options.call_options(CallOptions().max_captures(kMicrobatches));
  options.graph_options(GraphOptions().num_warmup_iters(1).gradients("**", GradientPolicy::accumulated));
  OffloadEngine engine(model, options);
  for (int s = 0; s < 3; ++s) {
    EXPECT_TRUE(same(model.train_step(&engine), plain.train_step(nullptr)));
    descend(model);
    descend(plain);
  }
  const StepTensors expected = plain.train_step(nullptr);
  synchronize(device);
  const Blocks outside = blocks_outside_of_graphs();
  reset_memory_peaks(device);
  sim::Recording recording;
  EXPECT_TRUE(same(model.train_step(&engine), expected));
  recording.stop();
  const Report report = engine.report();
  EXPECT_EQ(report.replays, 2 * kLayers * kStages * kMicrobatches);
  EXPECT_EQ(report.offloaded_bytes, plan.offloaded);
  EXPECT_EQ(plan.offloaded > 0, window.has_value());

  const auto of_weights_and_inputs = static_cast<std::int64_t>(outside.size()) * kBlock;
  EXPECT_EQ(memory_use(device).live_peak - of_weights_and_inputs, plan.peak);
  EXPECT_EQ(report.step_peak_bytes - of_weights_and_inputs, plan.peak);
  sim::Cost cost;
  cost.to_host_bandwidth = cost.memory_bandwidth / 1000;  // each graph waits for the copies whose memory it uses
  cost.to_device_bandwidth = cost.memory_bandwidth * 1000;
  EXPECT_EQ(peak_of_values(recording.works(), outside, cost), plan.peak);
  if (window && window->in_flight > kMicrobatches) {  // copies that do not trail hold less
    cost.to_host_bandwidth = cost.memory_bandwidth * 1000;
    EXPECT_LT(peak_of_values(recording.works(), outside, cost), plan.peak);
  }
}

TEST(PlannedPeakTest, FallsWithTheCallsInFlight) {
  const std::vector<PipelineStep> order = pipeline_order({4, kStages, kMicrobatches}, 0);
  const std::int64_t none = planned(order, few_in_flight(0)).peak;
  const std::int64_t one = planned(order, few_in_flight(1)).peak;
  EXPECT_LT(none, one);
  EXPECT_LE(one, planned(order, kWindow).peak);
}

INSTANTIATE_TEST_SUITE_P(Orders, OrderPeakTest,
                         testing::Values(Window{"without_offload", {}}, Window{"with_offload", kWindow},
                                         Window{"none_in_flight", few_in_flight(0)},
                                         Window{"one_in_flight", few_in_flight(1)}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace sidestream::testing_model
