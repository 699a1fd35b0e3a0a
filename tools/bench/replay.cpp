// What a replay costs the host: layers so small that the device is never what limits.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <CLI/CLI.hpp>

#include "sidestream/sidestream.h"
#include "tools/bench/step_time.h"

namespace sidestream {
namespace {

/// Two products, and parameters as many as a transformer block has: more kernels, and the device would be what is measured.
class TinyBlock : public torch::nn::Module {
 public:
  explicit TinyBlock(std::int64_t parameters) {
    for (std::int64_t i = 0; i < parameters; ++i) {
      weights_.push_back(register_parameter("weight" + std::to_string(i), at::ones({8})));
    }
  }
  at::Tensor forward(at::Tensor h, const at::Tensor* /*rope*/, std::int64_t /*start*/) {
    return h * weights_.front() * weights_.back();
  }

 private:
  std::vector<at::Tensor> weights_;
};

class TinyLayers : public torch::nn::Module {
 public:
  TinyLayers(std::int64_t layers, std::int64_t parameters) {
    for (std::int64_t i = 0; i < layers; ++i) {
      blocks_->push_back(std::make_shared<TinyBlock>(parameters));
    }
    register_module("blocks", blocks_);
  }
  at::Tensor forward(at::Tensor h) {
    constexpr const at::Tensor* kNoRope = nullptr;
    for (const auto& block : *blocks_) {
      h = call(block->as<TinyBlock>(), h, stays(kNoRope), std::int64_t{0});
    }
    return h;
  }

 private:
  torch::nn::ModuleList blocks_;
};

void measure(const std::string& device_name, std::int64_t layers, std::int64_t parameters, std::int64_t steps) {
  const c10::Device device = find_device(device_name);
  TinyLayers model(layers, parameters);
  model.to(device);
  for (at::Tensor& parameter : model.parameters()) {
    parameter.mutable_grad() = at::zeros_like(parameter);
  }
  OffloadEngine engine(model,
                       Options(device).graph("blocks.*").graph_options(GraphOptions().accumulate_in_graph(true)));
  at::Tensor x = at::ones({8}).to(device).requires_grad_(true);
  const at::Tensor gradient = at::ones({8}).to(device);
  const auto run = [&](std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      {
        const auto step = engine.step();
        model.forward(x).backward(gradient);
      }
      x.mutable_grad() = at::Tensor();
    }
  };
  run(10);
  constexpr std::int64_t kBlock = 20;  // steps: what else the machine does falls into few of them
  std::vector<double> wall;
  const double cpu_before = bench::cpu_seconds();
  for (std::int64_t done = 0; done < steps; done += kBlock) {
    const auto begin = std::chrono::steady_clock::now();
    run(kBlock);
    wall.push_back(bench::seconds_since(begin));
  }
  const double cpu = bench::cpu_seconds() - cpu_before;
  synchronize(device);
  const auto replays = static_cast<double>(2 * layers);
  std::fputs(fmt::format("{}, {} layers of {} parameters: {:.2f} us a replay, {:.2f} us of CPU time\n",
                         describe(device).name, layers, parameters, 1e6 * bench::median(wall) / (kBlock * replays),
                         1e6 * cpu / (static_cast<double>(wall.size()) * kBlock * replays))
                 .c_str(),
             stdout);
}

}  // namespace
}  // namespace sidestream

int main(int argc, char** argv) {
  CLI::App app("Host time of a replay, forward and backward, autograd's node included");
  std::string device = "auto";
  std::int64_t layers = 12;
  std::int64_t parameters = 12;
  std::int64_t steps = 500;
  app.add_option("--device", device, "auto, cuda or sim")->capture_default_str();
  app.add_option("--layers", layers)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--parameters", parameters, "of a layer")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--steps", steps)->check(CLI::PositiveNumber)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    sidestream::measure(device, layers, parameters, steps);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_replay: %s\n", error.what());
    return 1;
  }
  return 0;
}
