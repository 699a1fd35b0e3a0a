// Steps with their optimizer: eager, with a graph a layer, and as one graph, with offload and without; beside a bare launch of the
// one graph. Modes take turns, and are compared with others' steps of the same round.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tools/bench/bench_program.h"
#include "tools/bench/step_bench.h"

namespace {

using namespace sidestream;
using Json = nlohmann::ordered_json;
using bench::ModeTimes;
using bench::StepTime;

constexpr double kMicroseconds = 1e6;

std::vector<double> each(const std::vector<StepTime>& times, double StepTime::*field) {
  std::vector<double> values;
  for (const StepTime& time : times) {
    values.push_back(time.*field * kMicroseconds);
  }
  return values;
}

Json times_json(const std::vector<StepTime>& times) {
  return {{"wall_us", bench::median(each(times, &StepTime::wall))},
          {"issued_us", bench::median(each(times, &StepTime::issued))},
          {"cpu_us", bench::median(each(times, &StepTime::cpu))}};
}

/// What `compare` makes of the two in each round.
Json paired(const std::vector<StepTime>& ours, const std::vector<StepTime>& others, double StepTime::*field,
            const std::function<double(double, double)>& compare) {
  std::vector<double> values;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    values.push_back(compare(ours[i].*field, others[i].*field));
  }
  return {{"median", bench::median(values)},
          {"lowest", *std::min_element(values.begin(), values.end())},
          {"highest", *std::max_element(values.begin(), values.end())}};
}

Json mode_json(const ModeTimes& mode, const std::vector<ModeTimes>& all) {
  Json json{{"name", mode.name},
            {"step", times_json(mode.steps)},
            {"offloaded_bytes", mode.offloaded_bytes},
            {"captures", mode.captures}};
  const auto ratio = [](double ours, double others) { return ours / others; };
  for (const ModeTimes& other : all) {
    if (other.name != mode.name) {
      json["over " + other.name] = {{"wall", paired(mode.steps, other.steps, &StepTime::wall, ratio)},
                                    {"cpu", paired(mode.steps, other.steps, &StepTime::cpu, ratio)}};
    }
  }
  if (!mode.launches.empty()) {
    const auto more = [](double ours, double others) { return (ours - others) * kMicroseconds; };
    json["bare_launch"] = times_json(mode.launches);
    json["cpu_us_beyond_bare_launch"] = paired(mode.steps, mode.launches, &StepTime::cpu, more);
    json["issued_us_beyond_bare_launch"] = paired(mode.steps, mode.launches, &StepTime::issued, more);
  }
  return json;
}

Json measure(const bench::StepSettings& settings) {
  const std::vector<ModeTimes> times = bench::time_modes(settings);
  Json modes = Json::array();
  for (const ModeTimes& mode : times) {
    modes.push_back(mode_json(mode, times));
  }
  Json json{{"benchmark", "whole_step"},
            {"version", version()},
            {"device", describe(find_device(settings.device)).name},
            {"model", settings.model},
            {"layers", settings.shape.layers}};
  if (settings.model != "tiny") {
    json.update({{"hidden", settings.shape.hidden},
                 {"heads", settings.shape.heads},
                 {"kv_heads", settings.shape.kv_heads},
                 {"ffn", settings.shape.ffn},
                 {"tokens", settings.batch * settings.shape.seq},
                 {"dtype", settings.dtype},
                 {"offload", settings.offload},
                 {"min_kib", settings.min_kib}});
  }
  json["rounds"] = settings.rounds;
  json["steps_in_a_block"] = settings.steps_in_a_block();
  json["modes"] = std::move(modes);
  return json;
}

std::vector<std::string> mode_names() {
  std::vector<std::string> names;
  for (const bench::StepMode& mode : bench::step_modes()) {
    names.push_back(mode.name);
  }
  return names;
}

int run(int argc, char** argv) {
  bench::StepSettings settings;
  CLI::App app("Times whole steps: eager, one graph per layer, one graph. Prints JSON.", "bench_whole_step");
  app.add_option("--device", settings.device, "auto, cuda or sim")->capture_default_str();
  app.add_option("--model", settings.model, "tiny: layers of 8 numbers; transformer: layers on bytes")
      ->check(CLI::IsMember({"tiny", "transformer"}))
      ->capture_default_str();
  bench::add_layer_options(app, settings.shape);
  bench::add_positive(app, "--seq", settings.shape.seq);
  bench::add_positive(app, "--batch", settings.batch);
  app.add_option("--dtype", settings.dtype)->check(CLI::IsMember({"float32", "bfloat16"}))->capture_default_str();
  bench::add_positive(app, "--rounds", settings.rounds);
  bench::add_count(app, "--block", settings.block, "Steps that are timed together; 0: 20 with --model tiny, else 1");
  app.add_option("--offload", settings.offload, "Name patterns to offload in modes with offload, comma-separated")
      ->capture_default_str();
  bench::add_count(app, "--min-kib", settings.min_kib, "Storages with fewer KiB stay on the device");
  app.add_option("--modes", settings.modes, "Comma-separated")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::IsMember(mode_names()))
      ->default_str("all");
  app.add_option("--report", settings.report, "Write the JSON here as well");
  CLI11_PARSE(app, argc, argv);
  if (settings.modes.empty()) {
    settings.modes = mode_names();
  }
  const Json result = measure(settings);
  std::fputs((result.dump(2) + "\n").c_str(), stdout);
  bench::write_report(settings.report, result);
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return sidestream::bench::run_benchmark("bench_whole_step", run, argc, argv); }
