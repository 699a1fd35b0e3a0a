// What the order check costs: steps with it on against steps with it off, in turns and in pairs; and what it costs while it is off,
// from the time of the one thing that is then left on a step's path. "off again" is a second engine without it: the noise.
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <torch/utils.h>
#include <nlohmann/json.hpp>

#include "sidestream/sidestream.h"
#include "src/base/site.h"
#include "tools/bench/bench_program.h"
#include "tools/bench/block_stack.h"
#include "tools/bench/step_time.h"

namespace {

using namespace sidestream;
using Json = nlohmann::ordered_json;
using bench::median;
using bench::StepTime;

struct Settings {
  std::string device = "auto";
  byte_model::ModelShape shape{.layers = 6, .hidden = 256, .heads = 4, .kv_heads = 2, .ffn = 512, .seq = 256};
  std::int64_t rounds = 30;
  std::int64_t min_kib = 16;
  std::string report;
};

struct Placement {
  const char* name;
  const char* graph;
};
constexpr Placement kPlacements[] = {{"eager", ""}, {"graphs K=2", "blocks.*"}};
constexpr std::int64_t kForever = std::numeric_limits<std::int64_t>::max();
constexpr int kWarmSteps = 6;  // sizing, capture, replays

/// One engine, whose steps run in turns with those of the others.
struct Run {
  const char* name;
  std::unique_ptr<OffloadEngine> engine;
  std::vector<StepTime> times;
};

class Bench {
 public:
  explicit Bench(const Settings& settings) : settings_(settings), device_(find_device(settings.device)) {
    at::manual_seed(1);
    layers_ = std::make_shared<bench::BlockStack>(settings.shape);
    layers_->to(device_);
    for (at::Tensor& parameter : layers_->parameters()) {
      parameter.mutable_grad() = at::zeros_like(parameter);
    }
    const std::vector<std::int64_t> sizes{1, settings.shape.seq, settings.shape.hidden};
    input_ = at::randn(sizes).to(device_).requires_grad_();
    output_gradient_ = at::randn(sizes).mul_(1e-2).to(device_);
  }

  [[nodiscard]] std::unique_ptr<OffloadEngine> make_engine(const Placement& placement, std::int64_t check_steps) const {
    Options options(device_);
    options.offload("**").min_bytes(static_cast<std::size_t>(settings_.min_kib) * 1024).check_steps(check_steps);
    if (*placement.graph != 0) {
      options.graph(placement.graph)
          .graph_options(GraphOptions().side_streams(2).gradients("**", GradientPolicy::accumulated));
    }
    return std::make_unique<OffloadEngine>(*layers_, options);
  }

  StepTime step(OffloadEngine& engine) {
    const StepTime time = bench::time_of(device_, [&] {
      const auto step = engine.step();
      layers_->forward(input_).backward(output_gradient_);
    });
    input_.mutable_grad() = at::Tensor();
    return time;
  }

  Json measure(const Placement& placement) {
    std::vector<Run> runs;
    runs.push_back({"off", make_engine(placement, 0), {}});
    runs.push_back({"off again", make_engine(placement, 0), {}});
    runs.push_back({"on", make_engine(placement, kForever), {}});
    for (Run& run : runs) {
      for (int i = 0; i < kWarmSteps; ++i) {
        step(*run.engine);
      }
    }
    bench::in_turns(runs.size(), settings_.rounds,
                    [&](std::size_t i) { runs[i].times.push_back(step(*runs[i].engine)); });
    Json rows = Json::array();
    for (const Run& run : runs) {
      rows.push_back(row(run, runs.front()));
    }
    Json result{{"placement", placement.name}, {"runs", rows}};
    add_check(result, *runs.back().engine);
    return result;
  }

  [[nodiscard]] std::string device_name() const { return describe(device_).name; }

 private:
  static Json row(const Run& run, const Run& off) {
    std::vector<double> wall, issued, cpu, wall_ratio, issued_ratio, cpu_ratio;
    for (std::size_t i = 0; i < run.times.size(); ++i) {
      const StepTime& time = run.times[i];
      wall.push_back(time.wall);
      issued.push_back(time.issued);
      cpu.push_back(time.cpu);
      wall_ratio.push_back(time.wall / off.times[i].wall);
      issued_ratio.push_back(time.issued / off.times[i].issued);
      cpu_ratio.push_back(time.cpu / off.times[i].cpu);
    }
    return {{"check", run.name},
            {"step_ms_median", median(wall) * 1e3},
            {"issue_ms_median", median(issued) * 1e3},
            {"cpu_ms_median", median(cpu) * 1e3},
            {"step_over_off_paired_median", median(wall_ratio)},
            {"issue_over_off_paired_median", median(issued_ratio)},
            {"cpu_over_off_paired_median", median(cpu_ratio)}};
  }

  /// The check itself, which runs when a report is asked for, and how much there was to check.
  void add_check(Json& result, const OffloadEngine& checked) {
    const auto begin = std::chrono::steady_clock::now();
    const Report report = checked.report();
    const double seconds = bench::seconds_since(begin);
    const Journal journal = checked.journal();
    std::set<std::uint32_t> places;  // where the engine itself issued something: what it says with the check off, too
    for (const JournalOperation& operation : journal.operations) {
      const JournalSite& site = journal.sites[operation.site];
      if (static_cast<std::int64_t>(site.step) == report.steps && site.phase != 0 &&
          operation.kind != JournalKind::compute) {
        places.insert(operation.site);
      }
    }
    const auto steps = static_cast<double>(report.steps);
    result["operations_per_step"] = static_cast<double>(report.checked_operations) / steps;
    result["check_ms_per_step"] = seconds * 1e3 / steps;
    result["findings"] = report.order_findings.size();
    result["places_per_step"] = places.size();
  }

  const Settings& settings_;
  c10::Device device_;
  std::shared_ptr<bench::BlockStack> layers_;
  at::Tensor input_;
  at::Tensor output_gradient_;
};

/// Nanoseconds of saying where work is issued, which is all that a step does for the check while it is off.
double place_ns() {
  constexpr int kTimes = 10'000'000;
  const SiteName name("blocks.0");
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kTimes; ++i) {
    const Site site(Activity::launch_forward, name);
    asm volatile("" ::: "memory");  // as a call between its two writes
  }
  return bench::seconds_since(begin) * 1e9 / kTimes;
}

Json measure(const Settings& settings) {
  Bench bench(settings);
  Json placements = Json::array();
  const double ns = place_ns();
  for (const Placement& placement : kPlacements) {
    Json result = bench.measure(placement);
    const double step_ns = result["runs"][0]["cpu_ms_median"].get<double>() * 1e6;
    result["off_cost_share"] = ns * result["places_per_step"].get<double>() / step_ns;
    placements.push_back(std::move(result));
  }
  const byte_model::ModelShape& shape = settings.shape;
  return {{"benchmark", "checker"},  {"version", version()},      {"device", bench.device_name()},
          {"tokens", shape.seq},     {"layers", shape.layers},    {"hidden", shape.hidden},
          {"ffn", shape.ffn},        {"rounds", settings.rounds}, {"off_ns_per_place", ns},
          {"placements", placements}};
}

void print_table(const Json& result) {
  std::fputs(fmt::format("{}: {} layers, hidden {}, {} tokens; medians of {} rounds; ratios are medians of pairs\n",
                         result["device"].get<std::string>(), result["layers"].get<std::int64_t>(),
                         result["hidden"].get<std::int64_t>(), result["tokens"].get<std::int64_t>(),
                         result["rounds"].get<std::int64_t>())
                 .c_str(),
             stdout);
  std::fputs(fmt::format("{:<12}{:<12}{:>10}{:>8}{:>11}{:>8}{:>10}{:>8}\n", "placement", "check", "step ms", "/off",
                         "issue ms", "/off", "cpu ms", "/off")
                 .c_str(),
             stdout);
  for (const Json& placement : result["placements"]) {
    for (const Json& run : placement["runs"]) {
      std::fputs(fmt::format("{:<12}{:<12}{:>10.2f}{:>8.3f}{:>11.2f}{:>8.3f}{:>10.2f}{:>8.3f}\n",
                             placement["placement"].get<std::string>(), run["check"].get<std::string>(),
                             run["step_ms_median"].get<double>(), run["step_over_off_paired_median"].get<double>(),
                             run["issue_ms_median"].get<double>(), run["issue_over_off_paired_median"].get<double>(),
                             run["cpu_ms_median"].get<double>(), run["cpu_over_off_paired_median"].get<double>())
                     .c_str(),
                 stdout);
    }
    std::fputs(
        fmt::format("  on: {:.0f} operations a step, checked in {:.2f} ms a step, {} findings; off: {} places of "
                    "{:.2f} ns, {:.5f}% of the step's CPU time\n",
                    placement["operations_per_step"].get<double>(), placement["check_ms_per_step"].get<double>(),
                    placement["findings"].get<std::size_t>(), placement["places_per_step"].get<std::int64_t>(),
                    result["off_ns_per_place"].get<double>(), placement["off_cost_share"].get<double>() * 100)
            .c_str(),
        stdout);
  }
}

int run(int argc, char** argv) {
  Settings settings;
  CLI::App app("Times steps with the order check on and off.", "bench_checker");
  app.add_option("--device", settings.device, "auto, cuda or sim")->capture_default_str();
  bench::add_positive(app, "--tokens", settings.shape.seq);
  bench::add_layer_options(app, settings.shape);
  bench::add_count(app, "--min-kib", settings.min_kib, "Storages with fewer KiB stay on the device");
  bench::add_positive(app, "--rounds", settings.rounds);
  app.add_option("--report", settings.report, "Write JSON here");
  CLI11_PARSE(app, argc, argv);
  const Json result = measure(settings);
  print_table(result);
  bench::write_report(settings.report, result);
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return sidestream::bench::run_benchmark("bench_checker", run, argc, argv); }
