// Options::device_budget beside what it promises: for each number of tokens, budgets between what a step of transformer layers in graphs
// takes with everything offloaded and with nothing offloaded. A row says what the plan expected, and what steps took.
// The report is written after each row. A run that finds one of the same layers on the same device goes on where it ends.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tools/bench/bench_program.h"
#include "tools/bench/layer_bench.h"
#include "tools/cli/report_file.h"

namespace {

using namespace sidestream;
using Json = nlohmann::ordered_json;

constexpr double kMebibyte = 1.0 / (1 << 20);

/// Rows of an earlier run; empty if there is no report. Throws: UsageError if they are of another run than `header` says.
Json rows_of(const std::string& file, const Json& header) {
  std::ifstream in(file);
  if (!in) {
    return Json::array();
  }
  const Json report = Json::parse(in);
  for (const auto& [key, value] : header.items()) {
    const Json found = report.value(key, Json());
    if (found != value) {
      throw UsageError(fmt::format("report '{}' has {} {}, but this run has {}; give --report another file", file, key,
                                   found.dump(), value.dump()));
    }
  }
  return report.at("rows");
}

bool has(const Json& rows, std::int64_t tokens, const std::string& name) {
  return std::any_of(rows.begin(), rows.end(),
                     [&](const Json& row) { return row["tokens"] == tokens && row["name"] == name; });
}

double live(const Json& rows, std::int64_t tokens, const std::string& name) {
  for (const Json& row : rows) {
    if (row["tokens"] == tokens && row["name"] == name) {
      return row["live_peak_bytes"].get<double>();
    }
  }
  return 0;
}

void print(const Json& row) {
  const auto number = [&](const char* key, double scale) {
    return row.contains(key) ? fmt::format("{:.1f}", row[key].get<double>() * scale) : std::string("-");
  };
  std::fputs(fmt::format("{:>7} {:<12} budget {:>9} forecast {:>9} peak {:>9} MiB, offloaded {:>8} MiB, forecast {:>8} "
                         "once {:>8} median {:>8} ms\n",
                         row["tokens"].get<std::int64_t>(), row["name"].get<std::string>(),
                         number("device_budget", kMebibyte), number("forecast_peak_bytes", kMebibyte),
                         number("step_peak_bytes", kMebibyte), number("offloaded_bytes", kMebibyte),
                         number("forecast_ms", 1), number("measured_once_ms", 1), number("step_ms_median", 1))
                 .c_str(),
             stdout);
  std::fflush(stdout);
}

int run(int argc, char** argv) {
  bench::LayerSettings settings;
  std::vector<std::int64_t> tokens{2048, 8192, 32768};
  std::vector<double> parts{0.25, 0.5, 0.75};
  std::string report;
  CLI::App app("Trains transformer layers within budgets of device memory.", "bench_budget");
  app.add_option("--device", settings.device, "auto, cuda or sim")->capture_default_str();
  app.add_option("--tokens", tokens)->delimiter(',')->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--parts", parts, "Budgets: 0 is with everything offloaded, 1 with nothing")
      ->delimiter(',')
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  bench::add_layer_options(app, settings.shape);
  app.add_option("--dtype", settings.dtype)->check(CLI::IsMember({"float32", "bfloat16"}))->capture_default_str();
  bench::add_positive(app, "--min-kib", settings.min_kib);
  settings.lag_mib = 0;  // of "everything"
  app.add_option("--report", report, "JSON file; a run that finds it goes on where it ends");
  CLI11_PARSE(app, argc, argv);

  Json written = bench::report_header("budget", settings);  // all rows have it in common
  written["min_kib"] = settings.min_kib;
  Json rows = rows_of(report, written);
  const auto add = [&](Json row) {
    print(row);
    rows.push_back(std::move(row));
    if (!report.empty()) {
      written["rows"] = rows;
      cli::ReportFile(report, "--report").commit(written.dump(2) + '\n');
    }
  };
  for (const std::int64_t seq : tokens) {
    settings.shape.seq = seq;
    bench::LayerBench layers(settings, {});
    const auto add_row = [&](const std::string& name, const bench::LayerMode& mode) {
      if (!has(rows, seq, name)) {
        Json row{{"tokens", seq}, {"base_bytes", layers.base_bytes()}};
        row.update(mode.budget ? layers.within_budget(mode) : layers.memory(mode));
        add(std::move(row));
      }
    };
    add_row("nothing", {.name = "nothing", .graphs = true});
    add_row("everything", {.name = "everything", .graphs = true, .offload = true, .window = true, .everything = true});
    const double least = live(rows, seq, "everything");
    const double most = live(rows, seq, "nothing");
    for (const double part : parts) {
      const auto above = static_cast<std::int64_t>(least + part * (most - least));
      const std::string name = fmt::format("{:.0f}%", 100 * part);
      add_row(name, {.name = name, .graphs = true, .budget = static_cast<std::size_t>(layers.base_bytes() + above)});
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return bench::run_benchmark("bench_budget", run, argc, argv); }
