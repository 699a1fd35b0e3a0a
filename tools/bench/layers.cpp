// Step time, CPU time and device memory of transformer layers: eager, in graphs, and in graphs with offload, its window as the library
// has it and as given, on one side stream and two.
// All modes share the weights. Times are taken with all modes alive and in turns; memory with one mode alive at a time.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <CLI/Validators.hpp>
#include <nlohmann/json.hpp>

#include "sidestream/sidestream.h"
#include "tools/bench/block_stack.h"
#include "tools/bench/step_time.h"

namespace {

using namespace sidestream;
using Json = nlohmann::ordered_json;
using bench::BlockStack;
using bench::cpu_seconds;
using bench::median;
using bench::seconds_since;
using bench::StepTime;

struct Settings {
  std::string device = "auto";
  byte_model::ModelShape shape{.layers = 12, .hidden = 4096, .heads = 32, .kv_heads = 8, .ffn = 14336, .seq = 8192};
  std::string dtype = "bfloat16";
  std::vector<std::string> groups{"qkv", "core_attn", "proj", "norm2", "fc1"};
  std::int64_t rounds = 15;
  std::int64_t min_kib = 1024;
  std::optional<std::int64_t> lag_mib;
  std::optional<std::int64_t> lookahead_mib;
  std::string report;
};

struct Mode {
  std::string name;
  bool graphs = false;
  bool offload = false;
  std::optional<std::int64_t> side_streams = std::nullopt;
  bool window = false;  ///< lag and lookahead as given
};

const std::vector<Mode> kModes{{"eager"},
                               {"graphs", true},
                               {"graphs+offload", true, true},
                               {"graphs+offload K=2", true, true, 2},
                               {"graphs+offload window", true, true, std::nullopt, true}};
constexpr std::size_t kGraphs = 1;  // the mode that the others are paired with
constexpr int kWarmSteps = 4;       // sizing, capture, two replays

class Bench {
 public:
  explicit Bench(const Settings& settings) : settings_(settings), device_(find_device(settings.device)) {
    at::manual_seed(1);
    const at::ScalarType dtype = settings.dtype == "bfloat16" ? at::kBFloat16 : at::kFloat;
    layers_ = std::make_shared<BlockStack>(settings.shape);
    layers_->to(device_, dtype);
    for (at::Tensor& parameter : layers_->parameters()) {
      parameter.mutable_grad() = at::zeros_like(parameter);
    }
    const std::vector<std::int64_t> sizes{1, settings.shape.seq, settings.shape.hidden};
    input_ = at::randn(sizes).to(device_, dtype).requires_grad_();
    output_gradient_ = at::randn(sizes).mul_(1e-2).to(device_, dtype);
    synchronize(device_);
    release_cached_memory(device_);
    base_ = memory_use(device_);
  }

  [[nodiscard]] std::unique_ptr<OffloadEngine> make_engine(const Mode& mode) const {
    if (!mode.graphs) {
      return nullptr;
    }
    Options options(device_);
    options.graph("blocks.*")
        .min_bytes(static_cast<std::size_t>(settings_.min_kib) * 1024)
        .graph_options(GraphOptions().side_streams(mode.side_streams).accumulate_in_graph(true));
    if (mode.window) {
      if (settings_.lookahead_mib) {
        options.lookahead(static_cast<std::size_t>(*settings_.lookahead_mib) << 20);
      }
      if (settings_.lag_mib) {
        options.lag(static_cast<std::size_t>(*settings_.lag_mib) << 20);
      }
    }
    for (const std::string& group : settings_.groups) {
      if (mode.offload) {
        options.offload("blocks.*." + group);
      }
    }
    return std::make_unique<OffloadEngine>(*layers_, options);
  }

  StepTime step(OffloadEngine* engine) {
    synchronize(device_);
    const auto begin = std::chrono::steady_clock::now();
    const double cpu_before = cpu_seconds();
    {
      std::optional<Step> step;
      if (engine != nullptr) {
        step.emplace(engine->step());
      }
      layers_->forward(input_).backward(output_gradient_);
      if (step) {
        step->finish();
      }
    }
    StepTime time{.issued = seconds_since(begin), .cpu = cpu_seconds() - cpu_before};
    synchronize(device_);
    time.wall = seconds_since(begin);
    input_.mutable_grad() = at::Tensor();
    return time;
  }

  /// One mode by itself: bytes over weights and gradients.
  Json memory(const Mode& mode) {
    const std::unique_ptr<OffloadEngine> engine = make_engine(mode);
    for (int i = 0; i < kWarmSteps; ++i) {
      step(engine.get());
    }
    release_cached_memory(device_);
    reset_memory_peaks(device_);
    step(engine.get());
    step(engine.get());
    const MemoryUse use = memory_use(device_);
    Json json{{"name", mode.name},
              {"reserved_bytes", use.reserved_peak - base_.allocated},
              {"live_peak_bytes", use.live_peak - base_.allocated}};
    const Report report = engine ? engine->report() : Report{};
    json["offloaded_bytes"] = report.offloaded_bytes;
    json["in_flight_bytes"] = report.in_flight_bytes;
    json["pinned_bytes"] = report.pinned_bytes;
    json["waits"] = report.waits;
    json["captures"] = report.captures;
    json["notes"] = report.notes;
    return json;
  }

  /// All modes alive; each round steps through them, each once to warm the clocks and caches and once for the watch.
  std::vector<std::vector<StepTime>> times() {
    std::vector<std::unique_ptr<OffloadEngine>> engines;
    for (const Mode& mode : kModes) {
      engines.push_back(make_engine(mode));
      for (int i = 0; i < kWarmSteps; ++i) {
        step(engines.back().get());
      }
    }
    std::vector<std::vector<StepTime>> all(kModes.size());
    for (std::int64_t round = 0; round < settings_.rounds; ++round) {
      for (std::size_t i = 0; i < kModes.size(); ++i) {
        step(engines[i].get());
        all[i].push_back(step(engines[i].get()));
      }
    }
    return all;
  }

  [[nodiscard]] std::string device_name() const { return describe(device_).name; }
  [[nodiscard]] std::int64_t base_bytes() const { return base_.allocated; }

 private:
  const Settings& settings_;
  c10::Device device_;
  std::shared_ptr<BlockStack> layers_;
  at::Tensor input_;
  at::Tensor output_gradient_;
  MemoryUse base_;
};

void add_times(Json& mode, const std::vector<StepTime>& times, const std::vector<StepTime>& graphs) {
  std::vector<double> wall;
  std::vector<double> issued;
  std::vector<double> cpu;
  std::vector<double> ratio;
  for (std::size_t i = 0; i < times.size(); ++i) {
    wall.push_back(times[i].wall);
    issued.push_back(times[i].issued);
    cpu.push_back(times[i].cpu);
    ratio.push_back(times[i].wall / graphs[i].wall);
  }
  mode["step_ms_median"] = median(wall) * 1e3;
  mode["step_over_graphs_paired_median"] = median(ratio);
  mode["step_over_graphs_lowest"] = *std::min_element(ratio.begin(), ratio.end());
  mode["step_over_graphs_highest"] = *std::max_element(ratio.begin(), ratio.end());
  mode["issue_ms_median"] = median(issued) * 1e3;
  mode["cpu_ms_median"] = median(cpu) * 1e3;
}

Json measure(const Settings& settings) {
  Bench bench(settings);
  Json modes = Json::array();
  for (const Mode& mode : kModes) {
    modes.push_back(bench.memory(mode));
  }
  const auto times = bench.times();
  for (std::size_t i = 0; i < kModes.size(); ++i) {
    add_times(modes[i], times[i], times[kGraphs]);
    const auto moved = modes[i]["offloaded_bytes"].get<double>();
    if (moved > 0) {
      const double drop = modes[kGraphs]["live_peak_bytes"].get<double>() - modes[i]["live_peak_bytes"].get<double>();
      const double landed = moved - modes[i]["in_flight_bytes"].get<double>();
      modes[i]["r_gross"] = drop / moved;
      if (landed > 0) {
        modes[i]["r_net"] = drop / landed;
      }
    }
    modes[i]["reserved_over_eager"] =
        modes[i]["reserved_bytes"].get<double>() / modes[0]["reserved_bytes"].get<double>();
  }
  const byte_model::ModelShape& shape = settings.shape;
  return {{"benchmark", "layers"},
          {"version", version()},
          {"device", bench.device_name()},
          {"tokens", shape.seq},
          {"layers", shape.layers},
          {"hidden", shape.hidden},
          {"heads", shape.heads},
          {"kv_heads", shape.kv_heads},
          {"ffn", shape.ffn},
          {"dtype", settings.dtype},
          {"groups", fmt::format("{}", fmt::join(settings.groups, ","))},
          {"rounds", settings.rounds},
          {"lag_mib", settings.lag_mib ? Json(*settings.lag_mib) : Json()},
          {"lookahead_mib", settings.lookahead_mib ? Json(*settings.lookahead_mib) : Json()},
          {"weights_and_gradients_bytes", bench.base_bytes()},
          {"modes", modes}};
}

void print_table(const Json& result) {
  const auto mebibytes = [](const Json& bytes) { return bytes.get<double>() / (1 << 20); };
  std::fputs(
      fmt::format("{}, {} tokens, {} layers, hidden {}, {}; memory over the {:.0f} MiB of weights and gradients\n",
                  result["device"].get<std::string>(), result["tokens"].get<std::int64_t>(),
                  result["layers"].get<std::int64_t>(), result["hidden"].get<std::int64_t>(),
                  result["dtype"].get<std::string>(), mebibytes(result["weights_and_gradients_bytes"]))
          .c_str(),
      stdout);
  std::fputs(
      fmt::format("{:<22}{:>11}{:>10}{:>17}{:>11}{:>11}{:>11}{:>14}{:>13}{:>8}{:>8}\n", "mode", "step ms", "/graphs",
                  "(range)", "issue ms", "cpu ms", "live MiB", "reserved MiB", "offload MiB", "R", "R net")
          .c_str(),
      stdout);
  for (const Json& mode : result["modes"]) {
    const auto percent = [&](const char* key) {
      return mode.contains(key) ? fmt::format("{:.1f}%", mode[key].get<double>() * 100) : std::string("-");
    };
    const std::string range = fmt::format("{:.3f}-{:.3f}", mode["step_over_graphs_lowest"].get<double>(),
                                          mode["step_over_graphs_highest"].get<double>());
    std::fputs(fmt::format("{:<22}{:>11.2f}{:>10.3f}{:>17}{:>11.2f}{:>11.2f}{:>11.0f}{:>14.0f}{:>13.0f}{:>8}{:>8}\n",
                           mode["name"].get<std::string>(), mode["step_ms_median"].get<double>(),
                           mode["step_over_graphs_paired_median"].get<double>(), range,
                           mode["issue_ms_median"].get<double>(), mode["cpu_ms_median"].get<double>(),
                           mebibytes(mode["live_peak_bytes"]), mebibytes(mode["reserved_bytes"]),
                           mebibytes(mode["offloaded_bytes"]), percent("r_gross"), percent("r_net"))
                   .c_str(),
               stdout);
  }
}

int run(int argc, char** argv) {
  Settings settings;
  CLI::App app("Times transformer layers: eager, graphs, graphs with offload.", "bench_layers");
  app.add_option("--device", settings.device, "auto, cuda or sim")->capture_default_str();
  app.add_option("--tokens", settings.shape.seq)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--layers", settings.shape.layers)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--hidden", settings.shape.hidden)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--heads", settings.shape.heads)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--kv-heads", settings.shape.kv_heads)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--ffn", settings.shape.ffn)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--dtype", settings.dtype)->check(CLI::IsMember({"float32", "bfloat16"}))->capture_default_str();
  app.add_option("--groups", settings.groups, "Scopes that are offloaded, comma-separated")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->default_str("qkv,core_attn,proj,norm2,fc1");
  app.add_option("--min-kib", settings.min_kib, "Smaller storages stay on the device")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--lag-mib", settings.lag_mib, "Options::lag of the mode with a given window");
  app.add_option("--lookahead-mib", settings.lookahead_mib, "Options::lookahead of that mode");
  app.add_option("--rounds", settings.rounds)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--report", settings.report, "Write JSON here");
  CLI11_PARSE(app, argc, argv);
  const Json result = measure(settings);
  print_table(result);
  if (!settings.report.empty()) {
    std::FILE* file = std::fopen(settings.report.c_str(), "w");
    if (file == nullptr) {
      throw Error("report '" + settings.report + "' cannot be written");
    }
    std::fputs((result.dump(2) + "\n").c_str(), file);
    std::fclose(file);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "bench_layers: %s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_layers: %s\n", error.what());
  }
  return 1;
}
