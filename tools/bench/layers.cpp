// Step time, CPU time and device memory of transformer layers: eager, eager with offload, in graphs, and in graphs with offload, its
// window as the library has it and as given, on one side stream and two.
// All modes share the weights. Times are taken with all modes alive and in turns; memory with one mode alive at a time.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <iterator>
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
  std::optional<std::int64_t> host_gib;
  std::vector<std::string> modes;
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
                               {"eager+offload", false, true},
                               {"graphs", true},
                               {"graphs+offload", true, true},
                               {"graphs+offload K=2", true, true, 2},
                               {"graphs+offload window", true, true, std::nullopt, true}};
constexpr int kWarmSteps = 4;  // sizing, capture, two replays
constexpr std::size_t kWatchedSteps = 3;

StepTime median_of(const std::vector<StepTime>& times) {
  const auto of = [&](double StepTime::*field) {
    std::vector<double> values;
    std::transform(times.begin(), times.end(), std::back_inserter(values),
                   [&](const StepTime& time) { return time.*field; });
    return median(values);
  };
  return {.wall = of(&StepTime::wall), .issued = of(&StepTime::issued), .cpu = of(&StepTime::cpu)};
}

std::vector<std::string> mode_names() {
  std::vector<std::string> names;
  for (const Mode& mode : kModes) {
    names.push_back(mode.name);
  }
  return names;
}

class Bench {
 public:
  explicit Bench(const Settings& settings) : settings_(settings), device_(find_device(settings.device)) {
    const std::vector<std::string>& names = settings.modes;
    std::copy_if(kModes.begin(), kModes.end(), std::back_inserter(modes_),
                 [&](const Mode& mode) { return std::find(names.begin(), names.end(), mode.name) != names.end(); });
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

  /// The modes asked for, in their order.
  [[nodiscard]] const std::vector<Mode>& modes() const { return modes_; }

  [[nodiscard]] std::unique_ptr<OffloadEngine> make_engine(const Mode& mode) const {
    if (!mode.graphs && !mode.offload) {
      return nullptr;
    }
    Options options(device_);
    options.min_bytes(static_cast<std::size_t>(settings_.min_kib) * 1024);
    if (mode.graphs) {
      options.graph("blocks.*").graph_options(GraphOptions().side_streams(mode.side_streams).accumulate_in_graph(true));
    }
    if (mode.window) {
      if (settings_.lookahead_mib) {
        options.lookahead(static_cast<std::size_t>(*settings_.lookahead_mib) << 20);
      }
      if (settings_.lag_mib) {
        options.lag(static_cast<std::size_t>(*settings_.lag_mib) << 20);
      }
    }
    if (settings_.host_gib) {
      options.host_cap(static_cast<std::size_t>(*settings_.host_gib) << 30);
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

  /// One mode by itself: bytes over weights and gradients, of the first steps (which size, pin and capture) and of later ones.
  Json memory(const Mode& mode) {
    release_cached_memory(device_);  // of the mode before
    reset_memory_peaks(device_);
    const std::unique_ptr<OffloadEngine> engine = make_engine(mode);
    Json warm_seconds = Json::array();
    for (int i = 0; i < kWarmSteps; ++i) {
      warm_seconds.push_back(step(engine.get()).wall);
    }
    const MemoryUse warm = memory_use(device_);
    release_cached_memory(device_);
    reset_memory_peaks(device_);
    step(engine.get());
    step(engine.get());
    const MemoryUse use = memory_use(device_);
    Json json{{"name", mode.name},
              {"reserved_bytes", use.reserved_peak - base_.allocated},
              {"live_peak_bytes", use.live_peak - base_.allocated},
              {"first_steps_reserved_bytes", warm.reserved_peak - base_.allocated},
              {"first_steps_live_peak_bytes", warm.live_peak - base_.allocated},
              {"first_steps_seconds", warm_seconds}};
    const Report report = engine ? engine->report() : Report{};
    json["offloaded_bytes"] = report.offloaded_bytes;
    json["in_flight_bytes"] = report.in_flight_bytes;
    json["pinned_bytes"] = report.pinned_bytes;
    json["waits"] = report.waits;
    json["captures"] = report.captures;
    json["notes"] = report.notes;
    return json;
  }

  /// All modes alive; each round steps through them, in another order than the round before. A mode steps once to warm the clocks and
  /// caches, and then for the watch: its median counts.
  std::vector<std::vector<StepTime>> times() {
    std::vector<std::unique_ptr<OffloadEngine>> engines;
    for (const Mode& mode : modes_) {
      engines.push_back(make_engine(mode));
      for (int i = 0; i < kWarmSteps; ++i) {
        step(engines.back().get());
      }
    }
    std::vector<std::vector<StepTime>> all(modes_.size());
    for (std::int64_t round = 0; round < settings_.rounds; ++round) {
      for (std::size_t turn = 0; turn < modes_.size(); ++turn) {
        const std::size_t i = (turn + static_cast<std::size_t>(round)) % modes_.size();
        step(engines[i].get());
        std::vector<StepTime> watched(kWatchedSteps);
        std::generate(watched.begin(), watched.end(), [&] { return step(engines[i].get()); });
        all[i].push_back(median_of(watched));
      }
    }
    return all;
  }

  [[nodiscard]] std::string device_name() const { return describe(device_).name; }
  [[nodiscard]] std::int64_t base_bytes() const { return base_.allocated; }

 private:
  const Settings& settings_;
  c10::Device device_;
  std::vector<Mode> modes_;
  std::shared_ptr<BlockStack> layers_;
  at::Tensor input_;
  at::Tensor output_gradient_;
  MemoryUse base_;
};

/// Paired with `base`, round by round, under "step_over_<base>...".
void add_ratio(Json& mode, const std::vector<StepTime>& times, const std::string& base,
               const std::vector<StepTime>& base_times) {
  std::vector<double> ratio;
  for (std::size_t i = 0; i < times.size(); ++i) {
    ratio.push_back(times[i].wall / base_times[i].wall);
  }
  mode["step_over_" + base + "_paired_median"] = median(ratio);
  mode["step_over_" + base + "_lowest"] = *std::min_element(ratio.begin(), ratio.end());
  mode["step_over_" + base + "_highest"] = *std::max_element(ratio.begin(), ratio.end());
}

void add_times(Json& mode, const std::vector<StepTime>& times) {
  std::vector<double> wall;
  std::vector<double> issued;
  std::vector<double> cpu;
  for (const StepTime& time : times) {
    wall.push_back(time.wall);
    issued.push_back(time.issued);
    cpu.push_back(time.cpu);
  }
  mode["step_ms_median"] = median(wall) * 1e3;
  mode["issue_ms_median"] = median(issued) * 1e3;
  mode["cpu_ms_median"] = median(cpu) * 1e3;
}

/// R against `without`, the same mode without offload.
void add_rates(Json& mode, const Json& without) {
  const auto moved = mode["offloaded_bytes"].get<double>();
  if (moved > 0) {
    const double drop = without["live_peak_bytes"].get<double>() - mode["live_peak_bytes"].get<double>();
    const double landed = moved - mode["in_flight_bytes"].get<double>();
    mode["r_gross"] = drop / moved;
    if (landed > 0) {
      mode["r_net"] = drop / landed;
    }
  }
}

Json measure(const Settings& settings) {
  Bench bench(settings);
  Json modes = Json::array();
  for (const Mode& mode : bench.modes()) {
    modes.push_back(bench.memory(mode));
    std::fputs(fmt::format("{}: first steps {} s\n", mode.name, modes.back()["first_steps_seconds"].dump()).c_str(),
               stdout);
    std::fflush(stdout);
  }
  const auto place_of = [&](const std::string& name) {
    const auto found = std::find_if(modes.begin(), modes.end(), [&](const Json& mode) { return mode["name"] == name; });
    return found == modes.end() ? std::nullopt : std::optional<std::size_t>(found - modes.begin());
  };
  if (settings.rounds > 0) {
    const auto times = bench.times();
    for (std::size_t i = 0; i < modes.size(); ++i) {
      add_times(modes[i], times[i]);
      for (const char* base : {"graphs", "eager"}) {
        if (const auto place = place_of(base)) {
          add_ratio(modes[i], times[i], base, times[*place]);
        }
      }
    }
  }
  for (std::size_t i = 0; i < modes.size(); ++i) {
    if (const auto without = place_of(bench.modes()[i].graphs ? "graphs" : "eager")) {
      add_rates(modes[i], modes[*without]);
    }
    if (const auto eager = place_of("eager")) {
      modes[i]["reserved_over_eager"] =
          modes[i]["reserved_bytes"].get<double>() / modes[*eager]["reserved_bytes"].get<double>();
    }
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

/// "-" for what was not measured.
std::string cell(const Json& mode, const char* key, double scale, const char* format) {
  return mode.contains(key) ? fmt::format(fmt::runtime(format), mode[key].get<double>() * scale) : std::string("-");
}

std::string ratio_cell(const Json& mode, const std::string& base) {
  const std::string key = "step_over_" + base;
  if (!mode.contains(key + "_paired_median")) {
    return "-";
  }
  return fmt::format("{:.3f} ({:.3f}-{:.3f})", mode[key + "_paired_median"].get<double>(),
                     mode[key + "_lowest"].get<double>(), mode[key + "_highest"].get<double>());
}

void print_table(const Json& result) {
  constexpr double kMebibyte = 1.0 / (1 << 20);
  constexpr const char* kRow = "{:<22}{:>10}{:>22}{:>22}{:>10}{:>9}{:>10}{:>10}{:>13}{:>10}{:>8}{:>8}\n";
  std::fputs(
      fmt::format("{}, {} tokens, {} layers, hidden {}, {}; memory over the {:.0f} MiB of weights and gradients\n",
                  result["device"].get<std::string>(), result["tokens"].get<std::int64_t>(),
                  result["layers"].get<std::int64_t>(), result["hidden"].get<std::int64_t>(),
                  result["dtype"].get<std::string>(), result["weights_and_gradients_bytes"].get<double>() * kMebibyte)
          .c_str(),
      stdout);
  std::fputs(fmt::format(kRow, "mode", "step ms", "/graphs (range)", "/eager (range)", "issue ms", "cpu ms", "live MiB",
                         "reserved", "in 1st steps", "offload", "R", "R net")
                 .c_str(),
             stdout);
  for (const Json& mode : result["modes"]) {
    std::fputs(
        fmt::format(kRow, mode["name"].get<std::string>(), cell(mode, "step_ms_median", 1, "{:.2f}"),
                    ratio_cell(mode, "graphs"), ratio_cell(mode, "eager"), cell(mode, "issue_ms_median", 1, "{:.2f}"),
                    cell(mode, "cpu_ms_median", 1, "{:.2f}"), cell(mode, "live_peak_bytes", kMebibyte, "{:.0f}"),
                    cell(mode, "reserved_bytes", kMebibyte, "{:.0f}"),
                    cell(mode, "first_steps_reserved_bytes", kMebibyte, "{:.0f}"),
                    cell(mode, "offloaded_bytes", kMebibyte, "{:.0f}"), cell(mode, "r_gross", 100, "{:.1f}%"),
                    cell(mode, "r_net", 100, "{:.1f}%"))
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
  app.add_option("--host-gib", settings.host_gib, "Options::host_cap");
  app.add_option("--modes", settings.modes, "Comma-separated")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::IsMember(mode_names()))
      ->default_str("all");
  app.add_option("--rounds", settings.rounds, "0: memory alone")->check(CLI::NonNegativeNumber)->capture_default_str();
  app.add_option("--report", settings.report, "Write JSON here");
  CLI11_PARSE(app, argc, argv);
  if (settings.modes.empty()) {
    settings.modes = mode_names();
  }
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
