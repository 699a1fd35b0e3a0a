// Steps of the reference systems' form, run again in every order that streams and events allow.
#include <memory>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "graphs/engine_state.h"
#include "runtime/sim/recording.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/graph_event.h"
#include "unit/graphs/layer_stack.h"
#include "unit/runtime/every_order.h"

namespace sidestream {
namespace {

using sim::raw_bytes;
using testing_model::layer_stack;
using testing_model::rows;

constexpr std::uint64_t kSeeds = 50;

struct Form {
  std::string name;
  std::int64_t side_streams = 2;
  bool linked = true;
  std::size_t layers_run = 5;  ///< fewer: the rest of the chain is left out, and its groups come back inline
  bool stream = false;         ///< the caller's
  bool event = false;          ///< and the caller's
  bool accumulate = false;
};

void PrintTo(const Form& form, std::ostream* out) { *out << form.name; }

class GraphedCallableScheduleTest : public testing::TestWithParam<Form> {
 protected:
  /// Those of layers that were left out have none.
  static std::vector<at::Tensor> gradient_tensors(const torch::nn::Sequential& model, const at::Tensor& x) {
    std::vector<at::Tensor> tensors;
    for (const at::Tensor& parameter : model->parameters()) {
      tensors.push_back(parameter.grad());
    }
    tensors.push_back(x.grad());
    return tensors;
  }

  sim::OneThread one_thread_;
  c10::Device device_ = find_device("sim");
};

TEST_P(GraphedCallableScheduleTest, EveryOrderGivesTheGradientsOfPlainTraining) {
  const Form& form = GetParam();
  torch::nn::Sequential plain = layer_stack(5, device_);
  torch::nn::Sequential model = layer_stack(5, device_);
  OffloadEngine engine(*model, Options(device_).offload("layers.*.*").min_bytes(1024));
  const OwnedStream stream = engine.state()->runtime().create_stream();
  GraphOptions options = GraphOptions().side_streams(form.side_streams).accumulate_in_graph(form.accumulate);
  if (form.stream) {
    options.cuda_graph_stream(stream.get());
  }
  if (form.event) {
    options.cuda_graph_event(std::make_shared<GraphEvent>(device_));
  }
  auto layers = testing_model::graph_stack(engine, model, device_, options, form.linked);
  layers.erase(layers.begin() + static_cast<std::ptrdiff_t>(form.layers_run), layers.end());
  const auto one_step = [&](bool graphed, const at::Tensor& x, const at::Tensor& target) {
    at::Tensor h = x;
    if (graphed) {
      h = testing_model::run_stack(layers, x);
    } else {
      for (std::size_t i = 0; i < form.layers_run; ++i) {
        h = (plain->begin() + static_cast<std::ptrdiff_t>(i))->forward(h);
      }
    }
    (h * target).sum().backward();
  };
  for (std::int64_t s = 0; s < 2; ++s) {
    plain->zero_grad();
    model->zero_grad();
    one_step(false, rows(s, device_).requires_grad_(true), rows(s, device_, 1));
    one_step(true, rows(s, device_).requires_grad_(true), rows(s, device_, 1));
  }
  plain->zero_grad();
  model->zero_grad();
  const at::Tensor target = rows(2, device_, 1);
  const at::Tensor x_plain = rows(2, device_).requires_grad_(true);
  one_step(false, x_plain, target);
  synchronize(device_);
  const std::vector<std::byte> expected = raw_bytes(gradient_tensors(plain, x_plain));
  const at::Tensor x = rows(2, device_).requires_grad_(true);
  sim::Recording recording;
  one_step(true, x, target);
  recording.stop();
  ASSERT_EQ(raw_bytes(gradient_tensors(model, x)), expected);
  sim::expect_same_in_every_order(recording, gradient_tensors(model, x), expected, kSeeds);
}

INSTANTIATE_TEST_SUITE_P(Forms, GraphedCallableScheduleTest,
                         testing::Values(Form{"linked_1", 1}, Form{"linked_2", 2}, Form{"linked_3", 3},
                                         Form{"unlinked_2", 2, false}, Form{"part_1", 1, true, 3},
                                         Form{"part_2", 2, true, 2}, Form{"unlinked_part_2", 2, false, 2},
                                         Form{"stream", 2, true, 5, true}, Form{"stream_event", 2, true, 5, true, true},
                                         Form{"accumulating_2", 2, true, 5, false, false, true}),
                         [](const testing::TestParamInfo<Form>& info) { return info.param.name; });

/// A backward that stops at layer `stop` and leaves what it prefetched unused, then a pass that begins at layer `restart`.
struct Restart {
  std::int64_t side_streams;
  std::size_t stop;
  std::size_t restart;
  std::size_t end = 6;  ///< the second pass runs layers restart..end-1
};

class RestartScheduleTest : public testing::TestWithParam<Restart> {
 protected:
  sim::OneThread one_thread_;
  c10::Device device_ = find_device("sim");
};

TEST_P(RestartScheduleTest, AnUnusedPrefetchHarmsNoLaterForward) {
  constexpr std::size_t kLayers = 6;
  torch::nn::Sequential plain = layer_stack(kLayers, device_);
  torch::nn::Sequential model = layer_stack(kLayers, device_);
  OffloadEngine engine(*model, Options(device_).offload("layers.*.*").min_bytes(1024));
  const auto layers = testing_model::graph_stack(
      engine, model, device_, GraphOptions().side_streams(GetParam().side_streams), /*linked=*/false);
  const auto part = [&](bool graphed, std::size_t first, std::size_t last, at::Tensor h) {
    for (std::size_t i = first; i < last; ++i) {
      h = graphed ? layers[i]({h})[0] : (plain->begin() + static_cast<std::ptrdiff_t>(i))->forward(h);
    }
    return h;
  };
  const auto passes = [&](bool graphed, std::int64_t s) {
    std::vector<at::Tensor> grads;
    const at::Tensor x = rows(s, device_).requires_grad_(true);
    const at::Tensor cut = part(graphed, 0, GetParam().stop, x).detach().clone().requires_grad_(true);
    (part(graphed, GetParam().stop, kLayers, cut) * rows(s, device_, 1)).sum().backward();
    grads.push_back(cut.grad());
    const at::Tensor again = rows(s, device_, 2).requires_grad_(true);
    (part(graphed, GetParam().restart, GetParam().end, again) * rows(s, device_, 3)).sum().backward();
    grads.push_back(again.grad());
    for (const at::Tensor& parameter : (graphed ? model : plain)->parameters()) {
      grads.push_back(parameter.grad());
    }
    return grads;
  };
  for (std::int64_t s = 0; s < 2; ++s) {
    plain->zero_grad();
    model->zero_grad();
    (void)passes(false, s);
    (void)passes(true, s);
  }
  plain->zero_grad();
  model->zero_grad();
  const auto expected_grads = passes(false, 2);
  synchronize(device_);
  const std::vector<std::byte> expected = raw_bytes(expected_grads);
  sim::Recording recording;
  const auto grads = passes(true, 2);
  recording.stop();
  ASSERT_EQ(raw_bytes(grads), expected);
  sim::expect_same_in_every_order(recording, grads, expected, kSeeds);
}

INSTANTIATE_TEST_SUITE_P(Restarts, RestartScheduleTest,
                         testing::Values(Restart{1, 4, 1}, Restart{2, 4, 0}, Restart{2, 4, 1}, Restart{2, 3, 1},
                                         Restart{2, 3, 2}, Restart{3, 3, 1}, Restart{3, 2, 1}, Restart{3, 3, 2},
                                         Restart{2, 4, 1, 4}, Restart{2, 4, 0, 4}),
                         [](const testing::TestParamInfo<Restart>& info) {
                           return "K" + std::to_string(info.param.side_streams) + "_stop" +
                                  std::to_string(info.param.stop) + "_restart" + std::to_string(info.param.restart) +
                                  "_end" + std::to_string(info.param.end);
                         });

// A backward that did not reach the next layer's leaves that layer's seed, which is memory of the pool, to be written by the
// main stream, beside what the backward prefetched.
/// Layers 0..low-1 and cut..7 run. In these three the seed and what is prefetched share memory.
struct Skip {
  std::int64_t side_streams;
  std::size_t low;
  std::size_t cut;
};

class SkippedLayersScheduleTest : public testing::TestWithParam<Skip> {};

TEST_P(SkippedLayersScheduleTest, ASeedInThePoolIsWrittenBehindAnUnusedPrefetch) {
  const sim::OneThread one_thread;
  const c10::Device device = find_device("sim");
  constexpr std::size_t kLayers = 8;
  const std::size_t cut_layer = GetParam().cut;
  torch::nn::Sequential plain = layer_stack(kLayers, device);
  torch::nn::Sequential model = layer_stack(kLayers, device);
  OffloadEngine engine(*model, Options(device).offload("layers.*.*").min_bytes(1024));
  std::vector<Callable> callables;
  std::vector<std::vector<Sample>> samples;
  for (const torch::nn::AnyModule& layer : *model) {
    const auto i = static_cast<std::int64_t>(callables.size());
    const bool own = i == 0 || i == static_cast<std::int64_t>(cut_layer);
    samples.push_back({own ? Sample(rows(900 + i, device).requires_grad_(true)) : Sample::output_of(i - 1)});
    callables.emplace_back("layers." + std::to_string(i), layer);
  }
  const auto layers = make_graphed_callables(engine, std::move(callables), samples,
                                             GraphOptions().side_streams(GetParam().side_streams));
  const auto part = [&](bool graphed, std::size_t first, std::size_t last, at::Tensor h) {
    for (std::size_t i = first; i < last; ++i) {
      h = graphed ? layers[i]({h})[0] : (plain->begin() + static_cast<std::ptrdiff_t>(i))->forward(h);
    }
    return h;
  };
  const auto pass = [&](bool graphed, std::int64_t s) {
    plain->zero_grad();
    model->zero_grad();
    const at::Tensor x = rows(s, device).requires_grad_(true);
    const at::Tensor low = part(graphed, 0, GetParam().low, x);
    const at::Tensor cut = low.detach().clone().requires_grad_(true);
    (part(graphed, cut_layer, kLayers, cut) * rows(s, device, 1)).sum().backward();
    (low * cut.grad()).sum().backward();
    std::vector<at::Tensor> grads{x.grad(), cut.grad()};
    for (const at::Tensor& parameter : (graphed ? model : plain)->parameters()) {
      grads.push_back(parameter.grad());
    }
    return grads;
  };
  for (std::int64_t s = 0; s < 2; ++s) {
    (void)pass(false, s);
    (void)pass(true, s);
  }
  const auto expected_grads = pass(false, 2);
  synchronize(device);
  const std::vector<std::byte> expected = raw_bytes(expected_grads);
  sim::Recording recording;
  const auto grads = pass(true, 2);
  recording.stop();
  ASSERT_EQ(raw_bytes(grads), expected);
  sim::expect_same_in_every_order(recording, grads, expected, kSeeds);
}

INSTANTIATE_TEST_SUITE_P(Skips, SkippedLayersScheduleTest, testing::Values(Skip{2, 2, 5}, Skip{2, 4, 6}, Skip{1, 5, 7}),
                         [](const testing::TestParamInfo<Skip>& info) {
                           return "K" + std::to_string(info.param.side_streams) + "_low" +
                                  std::to_string(info.param.low) + "_cut" + std::to_string(info.param.cut);
                         });

TEST(StepEndTest, IsBehindAllCopiesOfItsGraphs) {
  const sim::OneThread one_thread;
  const c10::Device device = find_device("sim");
  torch::nn::Sequential model = layer_stack(5, device);
  OffloadEngine engine(*model, Options(device).offload("layers.*.*").min_bytes(1024));
  const auto layers = testing_model::graph_stack(engine, model, device, GraphOptions());
  { const auto sizing = engine.step(); }
  const at::Tensor x = rows(0, device).requires_grad_(true);
  synchronize(device);
  sim::Recording recording;
  {
    const auto step = engine.step();
    (void)layers[1]({layers[0]({x})[0]});  // nothing after it: its copies are what runs last
  }
  const at::Tensor after = at::ones({4}, x.options().requires_grad(false));
  recording.stop();
  EXPECT_GT(engine.report().offloaded_bytes, 0);
  EXPECT_TRUE(sim::last_work_is_behind_all_copies(recording, c10::Stream(c10::Stream::DEFAULT, device)));
}

}  // namespace
}  // namespace sidestream
