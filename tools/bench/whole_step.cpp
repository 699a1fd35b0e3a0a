// What a whole step as one graph costs the host, beside a bare launch of the same graph and beside the same layers graphed one by one.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <fmt/format.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <CLI/CLI.hpp>

#include "graphs/engine/engine_access.h"
#include "sidestream/sidestream.h"
#include "tools/bench/step_time.h"

namespace sidestream {
namespace {

/// So small that the device is never what limits.
class TinyLayer : public torch::nn::Module {
 public:
  TinyLayer() : weight_(register_parameter("weight", at::ones({8}))) {}
  at::Tensor forward(const at::Tensor& h) { return h * weight_; }

 private:
  at::Tensor weight_;
};

class TinyModel : public torch::nn::Module {
 public:
  explicit TinyModel(std::int64_t layers) {
    for (std::int64_t i = 0; i < layers; ++i) {
      blocks_->push_back(std::make_shared<TinyLayer>());
    }
    register_module("blocks", blocks_);
  }
  at::Tensor forward(at::Tensor h) {
    for (const auto& block : *blocks_) {
      h = call(block->as<TinyLayer>(), h);
    }
    return h;
  }
  static Tensors loss(TinyModel& model, const Tensors& inputs) {
    return {(model.forward(inputs[0]) * inputs[1]).sum()};
  }

 private:
  torch::nn::ModuleList blocks_;
};

struct HostTime {
  double wall = 0;  ///< of one step until it is issued, seconds
  double cpu = 0;   ///< of all threads, seconds
};

/// The median of blocks of steps, after a few that count not.
HostTime time_steps(std::int64_t steps, const std::function<void()>& run) {
  constexpr std::int64_t kWarm = 10;
  constexpr std::int64_t kBlock = 20;
  for (std::int64_t i = 0; i < kWarm; ++i) {
    run();
  }
  std::vector<double> wall;
  std::vector<double> cpu;
  for (std::int64_t done = 0; done < steps; done += kBlock) {
    const auto begin = std::chrono::steady_clock::now();
    const double cpu_begin = bench::cpu_seconds();
    for (std::int64_t i = 0; i < kBlock; ++i) {
      run();
    }
    wall.push_back(bench::seconds_since(begin) / kBlock);
    cpu.push_back((bench::cpu_seconds() - cpu_begin) / kBlock);
  }
  return {bench::median(wall), bench::median(cpu)};
}

/// `launch` alone, on a stream of its own: what no replay can be cheaper than.
HostTime time_bare(Runtime& runtime, const Graph& graph, std::int64_t steps) {
  const OwnedStream stream = runtime.create_stream();
  const HostTime time = time_steps(steps, [&] { runtime.launch(graph, stream); });
  runtime.synchronize_device();
  return time;
}

std::string json(const char* name, const HostTime& time) {
  return fmt::format("\"{}\": {{\"wall_us\": {:.3f}, \"cpu_us\": {:.3f}}}", name, 1e6 * time.wall, 1e6 * time.cpu);
}

void measure(const std::string& device_name, std::int64_t layers, std::int64_t steps) {
  const c10::Device device = find_device(device_name);
  const Tensors inputs{at::ones({8}).to(device), at::ones({8}).to(device)};

  auto whole_model = std::make_shared<TinyModel>(layers);
  whole_model->to(device);
  OffloadEngine whole_engine(*whole_model, Options(device));
  AdamW whole_optimizer(whole_model->parameters());
  const GraphedStep step = make_graphed_step(whole_engine, Callable("step", &TinyModel::loss, whole_model), {inputs},
                                             StepOptions().update([&] { whole_optimizer.step(); }));
  const HostTime whole = time_steps(steps, [&] { (void)step({inputs}); });
  synchronize(device);
  HostTime bare;
  EngineAccess::state(whole_engine).chains().for_each([&](const Chain& chain) {
    bare = time_bare(EngineAccess::state(whole_engine).runtime(), chain.layers().front().forward, steps);
  });

  auto layer_model = std::make_shared<TinyModel>(layers);
  layer_model->to(device);
  OffloadEngine layer_engine(*layer_model,
                             Options(device).graph("blocks.*").graph_options(GraphOptions().accumulate_in_graph(true)));
  AdamW layer_optimizer(layer_model->parameters());
  const HostTime by_layer = time_steps(steps, [&] {
    auto active = layer_engine.step();
    TinyModel::loss(*layer_model, inputs)[0].backward();
    layer_optimizer.step();
    layer_optimizer.zero_grad();
  });
  synchronize(device);
  std::fputs(fmt::format("{{\"device\": \"{}\", \"layers\": {}, {}, {}, {}}}\n", describe(device).name, layers,
                         json("whole_step", whole), json("bare_launch", bare), json("layer_graphs", by_layer))
                 .c_str(),
             stdout);
}

}  // namespace
}  // namespace sidestream

int main(int argc, char** argv) {
  CLI::App app(
      "Host time of a whole step as one graph, of its bare launch, and of the same step with a graph a layer; JSON");
  std::string device = "auto";
  std::int64_t layers = 12;
  std::int64_t steps = 500;
  app.add_option("--device", device, "auto, cuda or sim")->capture_default_str();
  app.add_option("--layers", layers)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--steps", steps)->check(CLI::PositiveNumber)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    sidestream::measure(device, layers, steps);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_whole_step: %s\n", error.what());
    return 1;
  }
  return 0;
}
