// Step time, CPU time and device memory of transformer layers: eager, eager with offload, in graphs, and in graphs with offload: of the
// given groups or of all groups ("graphs+offload:all"), with the library's window or a given window, on one side stream or two.
// All modes share the weights. Times are taken with all modes alive and in turns; memory with one mode alive at a time.
#include <algorithm>
#include <cstdio>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "tools/bench/bench_program.h"
#include "tools/bench/layer_bench.h"

namespace {

using namespace sidestream;
using Json = nlohmann::ordered_json;
using bench::median;
using bench::StepTime;

/// All there are, in the order in which they are measured.
const std::vector<bench::LayerMode>& layer_modes() {
  static const std::vector<bench::LayerMode> modes{
      {"eager"},
      {"eager+offload", false, true},
      {"graphs", true},
      {"graphs+offload", true, true},
      {"graphs+offload:all", true, true, std::nullopt, false, true},
      {"graphs+offload K=2", true, true, 2},
      {"graphs+offload window", true, true, std::nullopt, true},
      {.name = "graphs slots", .graphs = true, .told = false},
      {.name = "graphs+offload slots", .graphs = true, .offload = true, .told = false},
      {.name = "graphs cloned", .graphs = true, .gradients = GradientPolicy::cloned},
      {.name = "graphs owned", .graphs = true, .gradients = GradientPolicy::owned},
      {.name = "graphs delayed", .graphs = true, .gradients = GradientPolicy::delayed},
      {.name = "graphs+offload delayed", .graphs = true, .offload = true, .gradients = GradientPolicy::delayed}};
  return modes;
}

std::vector<std::string> mode_names() {
  std::vector<std::string> names;
  for (const bench::LayerMode& mode : layer_modes()) {
    names.push_back(mode.name);
  }
  return names;
}

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
  // Of microbatches in an order, those in flight are on the host at once.
  const auto moved = std::min(mode["offloaded_bytes"].get<double>(), mode["pinned_requested_bytes"].get<double>());
  if (moved > 0) {
    const double drop = without["live_peak_bytes"].get<double>() - mode["live_peak_bytes"].get<double>();
    const double landed = moved - mode["in_flight_bytes"].get<double>();
    mode["r_gross"] = drop / moved;
    if (landed > 0) {
      mode["r_net"] = drop / landed;
    }
  }
}

Json measure(const bench::LayerSettings& settings, const std::vector<std::string>& names) {
  std::vector<bench::LayerMode> asked;
  std::copy_if(
      layer_modes().begin(), layer_modes().end(), std::back_inserter(asked),
      [&](const bench::LayerMode& mode) { return std::find(names.begin(), names.end(), mode.name) != names.end(); });
  bench::LayerBench layers(settings, asked);
  Json modes = Json::array();
  for (const bench::LayerMode& mode : layers.modes()) {
    modes.push_back(layers.memory(mode));
    std::fputs(fmt::format("{}: first steps {} s\n", mode.name, modes.back()["first_steps_seconds"].dump()).c_str(),
               stdout);
    std::fflush(stdout);
  }
  const auto place_of = [&](const std::string& name) {
    const auto found = std::find_if(modes.begin(), modes.end(), [&](const Json& mode) { return mode["name"] == name; });
    return found == modes.end() ? std::nullopt : std::optional<std::size_t>(found - modes.begin());
  };
  if (settings.rounds > 0) {
    const auto times = layers.times();
    for (std::size_t i = 0; i < modes.size(); ++i) {
      add_times(modes[i], times[i]);
      for (const char* base : {"graphs", "graphs cloned", "graphs delayed", "eager"}) {
        if (const auto place = place_of(base)) {
          add_ratio(modes[i], times[i], base, times[*place]);
        }
      }
    }
  }
  for (std::size_t i = 0; i < modes.size(); ++i) {
    const bool delays = layers.modes()[i].gradients == GradientPolicy::delayed;
    if (const auto without = place_of(delays ? "graphs delayed" : layers.modes()[i].graphs ? "graphs" : "eager")) {
      add_rates(modes[i], modes[*without]);
    }
    if (const auto eager = place_of("eager")) {
      modes[i]["reserved_over_eager"] =
          modes[i]["reserved_bytes"].get<double>() / modes[*eager]["reserved_bytes"].get<double>();
    }
  }
  Json json = bench::report_header("layers", settings);
  json.update({{"tokens", settings.shape.seq},
               {"groups", fmt::format("{}", fmt::join(settings.groups, ","))},
               {"ranks", settings.ranks},
               {"microbatches", settings.microbatches},
               {"backward_only", settings.backward_only},
               {"unset_gradients", settings.unset_gradients},
               {"rounds", settings.rounds},
               {"lag_mib", settings.lag_mib ? Json(*settings.lag_mib) : Json()},
               {"lookahead_mib", settings.lookahead_mib ? Json(*settings.lookahead_mib) : Json()},
               {"weights_and_gradients_bytes", layers.base_bytes()},
               {"modes", modes}});
  return json;
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
  constexpr const char* kRow = "{:<22}{:>10}{:>22}{:>22}{:>10}{:>9}{:>10}{:>10}{:>13}{:>10}{:>12}\n";
  std::fputs(
      fmt::format("{}, {} tokens, {} layers, hidden {}, {}; memory over the {:.0f} MiB of weights and gradients\n",
                  result["device"].get<std::string>(), result["tokens"].get<std::int64_t>(),
                  result["layers"].get<std::int64_t>(), result["hidden"].get<std::int64_t>(),
                  result["dtype"].get<std::string>(), result["weights_and_gradients_bytes"].get<double>() * kMebibyte)
          .c_str(),
      stdout);
  std::fputs(fmt::format(kRow, "mode", "step ms", "/graphs (range)", "/eager (range)", "issue ms", "cpu ms", "live MiB",
                         "reserved", "in 1st steps", "offload", "saved of it")
                 .c_str(),
             stdout);
  for (const Json& mode : result["modes"]) {
    std::fputs(
        fmt::format(kRow, mode["name"].get<std::string>(), cell(mode, "step_ms_median", 1, "{:.2f}"),
                    ratio_cell(mode, "graphs"), ratio_cell(mode, "eager"), cell(mode, "issue_ms_median", 1, "{:.2f}"),
                    cell(mode, "cpu_ms_median", 1, "{:.2f}"), cell(mode, "live_peak_bytes", kMebibyte, "{:.0f}"),
                    cell(mode, "reserved_bytes", kMebibyte, "{:.0f}"),
                    cell(mode, "first_steps_reserved_bytes", kMebibyte, "{:.0f}"),
                    cell(mode, "offloaded_bytes", kMebibyte, "{:.0f}"), cell(mode, "r_gross", 100, "{:.1f}%"))
            .c_str(),
        stdout);
  }
}

int run(int argc, char** argv) {
  bench::LayerSettings settings;
  std::vector<std::string> modes;
  std::string report;
  CLI::App app("Times transformer layers: eager, graphs, graphs with offload.", "bench_layers");
  app.add_option("--device", settings.device, "auto, cuda or sim")->capture_default_str();
  bench::add_positive(app, "--tokens", settings.shape.seq);
  bench::add_layer_options(app, settings.shape);
  app.add_option("--dtype", settings.dtype)->check(CLI::IsMember({"float32", "bfloat16"}))->capture_default_str();
  app.add_option("--groups", settings.groups,
                 "Groups that are offloaded, comma-separated; ':all' modes offload each group")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->default_str("qkv,core_attn,proj,norm2,fc1");
  bench::add_count(app, "--min-kib", settings.min_kib, "Storages with fewer KiB stay on the device");
  app.add_option("--lag-mib", settings.lag_mib, "Options::lag of the mode with a set window");
  app.add_option("--lookahead-mib", settings.lookahead_mib, "Options::lookahead of that mode");
  app.add_option("--host-gib", settings.host_gib, "Options::host_cap");
  app.add_option("--modes", modes, "Comma-separated")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::IsMember(mode_names()))
      ->default_str("all");
  bench::add_count(app, "--microbatches", settings.microbatches,
                   "Of a step, in the 1F1B order of the first rank; 0: one, alone");
  bench::add_positive(app, "--ranks", settings.ranks, "Of the pipeline whose first rank has the layers");
  app.add_flag("--backward", settings.backward_only, "Time the backward alone, weight gradients included")
      ->excludes("--microbatches");
  app.add_flag("--unset-gradients", settings.unset_gradients,
               "Each step begins without gradients, as after zero_grad()");
  bench::add_count(app, "--rounds", settings.rounds, "0: measure memory only");
  app.add_option("--traces", settings.traces, "Write one step of each mode into this folder, for Perfetto")
      ->check(CLI::ExistingDirectory);
  app.add_option("--report", report, "Write JSON here");
  CLI11_PARSE(app, argc, argv);
  if (modes.empty()) {
    modes = mode_names();
  }
  const Json result = measure(settings, modes);
  print_table(result);
  bench::write_report(report, result);
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return sidestream::bench::run_benchmark("bench_layers", run, argc, argv); }
