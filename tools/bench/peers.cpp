// What else saves memory, on the same layers in the same process: saved tensors copied to the host as they are saved, and layers that are
// recomputed in backward, beside offload and together with it, each for a growing number of layers.
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <nlohmann/json.hpp>

#include "offload/autograd_engine.h"
#include "sidestream/error.h"
#include "tools/bench/bench_program.h"
#include "tools/bench/layer_bench.h"

namespace sidestream {
namespace {

using Json = nlohmann::ordered_json;
using bench::BlockStack;
using bench::LayerMode;

/// As torch.autograd.graph.save_on_cpu(pin_memory=True): the host waits for each copy to it, and not for the copies back.
class SavedOnCpu : public SavedTensorSource {
 public:
  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override {
    struct Hooks final : torch::autograd::SavedVariableHooks {
      void call_pack_hook(const at::Tensor& tensor) override {
        device = tensor.device();
        saved = at::empty(tensor.sizes(), tensor.options().device(c10::kCPU).pinned_memory(device.is_cuda()));
        saved.copy_(tensor);
      }
      at::Tensor call_unpack_hook() override { return saved.to(saved.options().device(device), device.is_cuda()); }

      at::Tensor saved;
      c10::Device device = c10::kCPU;
    };
    return std::make_unique<Hooks>();
  }
};

/// As torch.utils.checkpoint with use_reentrant=True. The layers draw no random numbers.
class Recomputed : public torch::autograd::Function<Recomputed> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& h, BlockStack* stack,
                            std::int64_t layer) {
    context->save_for_backward({h});
    context->saved_data["stack"] = reinterpret_cast<std::int64_t>(stack);
    context->saved_data["layer"] = layer;
    return stack->forward_layer(layer, h);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    auto* stack = reinterpret_cast<BlockStack*>(context->saved_data["stack"].toInt());
    const at::Tensor h = context->get_saved_variables().front().detach().requires_grad_();
    {
      const at::AutoGradMode grad(true);
      torch::autograd::backward({stack->forward_layer(context->saved_data["layer"].toInt(), h)}, {gradients.front()});
    }
    return {h.grad(), {}, {}};
  }
};

at::Tensor recomputed(BlockStack& stack, std::int64_t layer, const at::Tensor& h) {
  const OffloadScope scope("recomputed");  // of the layer's input, where an engine offloads it
  return Recomputed::apply(h, &stack, layer);
}

/// `way` for the first `layers`, then the layers' own forward.
template <typename Way>
LayerMode with(LayerMode mode, std::int64_t layers, Way way) {
  mode.name += fmt::format(" {}", layers);
  mode.forward = [layers, way](BlockStack& stack, at::Tensor h) {
    for (std::int64_t i = 0; i < stack.layers(); ++i) {
      h = i < layers ? way(stack, i, h) : stack.forward_layer(i, h);
    }
    return h;
  };
  return mode;
}

/// Modes whose engines are alive at the same time. All of them would not fit into the memory of a GPU.
using ModeSet = std::vector<LayerMode>;

/// Each set begins with the same two modes, so that the others can be compared with them in turns.
std::vector<ModeSet> modes_of(std::int64_t layers, std::int64_t points) {
  const ModeSet plain{{.name = "eager"}, {.name = "graphs", .graphs = true}};
  ModeSet alone = plain;
  ModeSet more = plain;
  for (std::int64_t point = 1; point <= points; ++point) {
    const std::int64_t first = layers * point / points;
    alone.push_back({.name = fmt::format("graphs+offload {}", first), .graphs = true, .offload = true});
    alone.back().offloaded_layers = first;
    more.push_back({.name = fmt::format("graphs+offload:all {}", first), .graphs = true, .offload = true});
    more.back().everything = true;
    more.back().offloaded_layers = first;
  }
  for (std::int64_t point = 1; point <= points; ++point) {
    const std::int64_t first = layers * point / points;
    alone.push_back(with({.name = "saved on CPU"}, first, [](BlockStack& stack, std::int64_t i, auto& h) {
      SavedOnCpu source;
      const SavedTensorGuard guard(&source);
      return stack.forward_layer(i, h);
    }));
    more.push_back(with({.name = "recomputed+offload", .offload = true}, first, recomputed));
    more.back().recomputed_layers = first;
  }
  for (std::int64_t point = 1; point <= points; ++point) {
    alone.push_back(with({.name = "recomputed"}, layers * point / points, recomputed));
  }
  return {alone, more};
}

/// Over the largest magnitude of the parameter's gradient.
double largest_difference(const std::vector<at::Tensor>& gradients, const std::vector<at::Tensor>& right) {
  std::vector<at::Tensor> differences;
  for (std::size_t i = 0; i < right.size(); ++i) {
    const at::Tensor difference = gradients[i].to(at::kFloat) - right[i].to(at::kFloat);
    differences.push_back(difference.abs().max() / right[i].abs().max().to(at::kFloat));
  }
  return at::stack(differences).max().item<double>();  // nan if one is
}

/// The figures of each mode.
Json measure_set(bench::LayerBench& layers, const bench::LayerSettings& settings) {
  const ModeSet& modes = layers.modes();
  Json measured = Json::array();
  for (const LayerMode& mode : modes) {
    measured.push_back(layers.memory(mode));
  }
  const std::vector<at::Tensor> right = layers.gradients(modes.front());
  for (std::size_t i = 0; i < modes.size(); ++i) {
    measured[i]["gradient_difference"] = largest_difference(layers.gradients(modes[i]), right);
  }
  const auto times = settings.rounds > 0 ? layers.times() : std::vector<std::vector<bench::StepTime>>();
  for (std::size_t i = 0; i < times.size(); ++i) {
    std::vector<double> wall;
    for (const bench::StepTime& time : times[i]) {
      wall.push_back(time.wall);
    }
    measured[i]["step_ms_median"] = bench::median(wall) * 1e3;
    measured[i]["tokens_per_second"] = static_cast<double>(settings.shape.seq) / bench::median(wall);
  }
  return measured;
}

Json measure(const bench::LayerSettings& settings, const std::vector<ModeSet>& sets) {
  install_autograd_engine();
  Json measured = Json::array();
  std::int64_t base_bytes = 0;
  for (std::size_t i = 0; i < sets.size(); ++i) {
    bench::LayerBench layers(settings, sets[i]);
    for (Json& mode : measure_set(layers, settings)) {
      mode["set"] = i + 1;
      measured.push_back(std::move(mode));
    }
    base_bytes = layers.base_bytes();
  }
  Json json = bench::report_header("peers", settings);
  json.update({{"tokens", settings.shape.seq},
               {"groups", fmt::format("{}", fmt::join(settings.groups, ","))},
               {"rounds", settings.rounds},
               {"weights_and_gradients_bytes", base_bytes},
               {"modes", measured}});
  return json;
}

void print_table(const Json& result) {
  std::printf("%-20s%10s%14s%12s%14s%22s\n", "mode", "step ms", "tokens/s", "live MiB", "reserved MiB",
              "gradients differ by");
  for (const Json& mode : result["modes"]) {
    const auto mebibytes = [&](const char* key) { return mode[key].get<double>() / (1 << 20); };
    std::printf("%-20s%10.2f%14.0f%12.0f%14.0f%22.2g\n", mode["name"].get<std::string>().c_str(),
                mode.value("step_ms_median", 0.0), mode.value("tokens_per_second", 0.0), mebibytes("live_peak_bytes"),
                mebibytes("reserved_bytes"), mode["gradient_difference"].get<double>());
  }
}

int run(int argc, char** argv) {
  bench::LayerSettings settings;
  std::int64_t points = 4;
  std::string report;
  CLI::App app(
      "Tokens per second and device memory of transformer layers: graphs with offload, saved tensors on the CPU, and "
      "recomputation, of a growing number of layers",
      "bench_peers");
  app.add_option("--device", settings.device, "auto, cuda or sim")->capture_default_str();
  bench::add_positive(app, "--tokens", settings.shape.seq);
  bench::add_layer_options(app, settings.shape);
  app.add_option("--dtype", settings.dtype)->check(CLI::IsMember({"float32", "bfloat16"}))->capture_default_str();
  bench::add_positive(app, "--points", points, "How many numbers of layers each way is measured with");
  bench::add_count(app, "--rounds", settings.rounds, "0: measure memory only");
  app.add_option("--report", report, "Write JSON here");
  CLI11_PARSE(app, argc, argv);
  if (points > settings.shape.layers) {
    throw UsageError(fmt::format("--points is {}, but there are {} layers; use at most as many points", points,
                                 settings.shape.layers));
  }
  const Json result = measure(settings, modes_of(settings.shape.layers, points));
  print_table(result);
  bench::write_report(report, result);
  return 0;
}

}  // namespace
}  // namespace sidestream

int main(int argc, char** argv) { return sidestream::bench::run_benchmark("bench_peers", sidestream::run, argc, argv); }
