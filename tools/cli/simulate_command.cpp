#include "tools/cli/simulate_command.h"

#include <algorithm>
#include <cmath>
#include <string>

#include <fmt/format.h>
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

#include "sidestream/error.h"
#include "tools/cli/pipeline_shape.h"
#include "tools/cli/report_file.h"
#include "tools/cli/simulate_files.h"
#include "tools/cli/standard_output.h"
#include "tools/cli/value_checks.h"

namespace sidestream::cli {
namespace {

constexpr double kMebibyte = 1 << 20;
constexpr double kMostMebibytes = 1 << 22;
constexpr double kMostMilliseconds = 1e9;
constexpr double kLeastRate = 1e-3;  ///< GB/s
constexpr double kMostRate = 1e6;

constexpr const char* kFooter =
    R"(The defaults are the costs of a transformer layer of 8,192 tokens on an H200, hidden size 4096, bf16 (docs/measurements.md):
forward and backward from the time of 12 layers and of their backwards; what a layer saves, and what of it the groups qkv,
core_attn, proj, norm2 and fc1 hold; the input and the output of a chunk; and what 12 layers have at their peak besides. Sends take
no time unless you say so.

Examples:
  sidestream simulate --pp 4 --vpp 2 --microbatches 16 --trace step.json
      Writes each forward, backward and copy for Perfetto (ui.perfetto.dev).
  sidestream simulate --pp 4 --microbatches 8 --alone 0
      What the first rank takes on one GPU alone, as bench_layers --ranks 4 measures it.)";

std::int64_t bytes_of(double mib) { return std::llround(mib * kMebibyte); }

std::optional<std::int64_t> bytes_of(const std::optional<double>& mib) {
  return mib ? std::optional(bytes_of(*mib)) : std::nullopt;
}

/// Costs that contradict each other, said in the words of the options.
void require_consistent(const SimulateOptions& options) {
  const bool delayed = options.shape.delay_weight_gradients;
  if ((options.weights_ms || options.for_weights_mib) && !delayed) {
    throw UsageError("--weights-ms and --for-weights-mib work only with delayed weight gradients: add --dw");
  }
  if (options.weights_ms.value_or(0) > options.backward_ms) {
    throw UsageError(
        fmt::format("--weights-ms {} is more than --backward-ms {}; weight gradients are a part of the backward",
                    *options.weights_ms, options.backward_ms));
  }
  if (options.offloadable_mib > options.saved_mib) {
    throw UsageError(fmt::format("--offloadable-mib {} is more than --saved-mib {}; offload at most what a layer saves",
                                 options.offloadable_mib, options.saved_mib));
  }
}

PipelineCosts costs_of(const SimulateOptions& options) {
  PipelineCosts costs;
  costs.layers = options.layers;
  costs.forward_seconds = options.forward_ms / 1e3;
  costs.backward_seconds = options.backward_ms / 1e3;
  costs.weights_seconds = options.weights_ms.value_or(options.backward_ms / 2) / 1e3;
  costs.send_seconds = options.send_ms / 1e3;
  costs.saved_bytes = bytes_of(options.saved_mib);
  costs.offloadable_bytes = bytes_of(options.offloadable_mib);
  costs.for_weights_bytes = bytes_of(options.for_weights_mib).value_or(costs.saved_bytes);
  costs.chunk_bytes = bytes_of(options.chunk_mib);
  costs.forward_more_bytes = bytes_of(options.forward_more_mib);
  costs.backward_more_bytes = bytes_of(options.backward_more_mib);
  costs.to_host = options.to_host_gbs * 1e9;
  costs.to_device = options.to_device_gbs * 1e9;
  costs.lag = bytes_of(options.lag_mib);
  costs.lookahead = bytes_of(options.lookahead_mib);
  return costs;
}

SimulatedRanks simulated(const SimulateOptions& options, const PipelineCosts& costs) {
  if (options.alone) {
    return {options.shape, *options.alone, {forecast_rank(options.shape, costs, *options.alone)}};
  }
  return {options.shape, 0, forecast_pipeline(options.shape, costs)};
}

std::string title_of(const SimulateOptions& options) {
  return title(options.shape) + (options.alone ? fmt::format(", rank {} alone", *options.alone) : "");
}

/// The largest peak of live memory of all ranks, with and without offload.
std::int64_t largest(const SimulatedRanks& simulated, std::int64_t RankForecast::*peak) {
  std::int64_t most = 0;
  for (const RankForecast& rank : simulated.ranks) {
    most = std::max(most, rank.*peak);
  }
  return most;
}

/// `plain`: seconds of the same step without offload.
std::string totals(const SimulatedRanks& simulated, double plain) {
  const double seconds = simulated.ranks.front().seconds;
  return fmt::format(
      "A step takes {:.1f} ms, and {:.1f} ms without offload. The largest peak is {:.1f} MiB, and {:.1f} MiB without "
      "offload.",
      1e3 * seconds, 1e3 * plain, static_cast<double>(largest(simulated, &RankForecast::peak_bytes)) / kMebibyte,
      static_cast<double>(largest(simulated, &RankForecast::peak_bytes_without_offload)) / kMebibyte);
}

std::string table(const SimulatedRanks& simulated) {
  std::string text = "rank      step      busy    bubble   exposed  peak, no offload      peak  offloaded\n";
  for (std::size_t i = 0; i < simulated.ranks.size(); ++i) {
    const RankForecast& rank = simulated.ranks[i];
    const auto mib = [](std::int64_t bytes) { return static_cast<double>(bytes) / kMebibyte; };
    text += fmt::format("{:4} {:9.1f} {:9.1f} {:9.1f} {:9.1f} {:17.1f} {:9.1f} {:10.1f}\n",
                        simulated.first + static_cast<std::int64_t>(i), 1e3 * rank.seconds, 1e3 * rank.busy_seconds,
                        1e3 * rank.idle_seconds, 1e3 * rank.waited_seconds, mib(rank.peak_bytes_without_offload),
                        mib(rank.peak_bytes), mib(rank.offloaded_bytes));
  }
  return text;
}

}  // namespace

void declare_simulate_options(CLI::App& command, SimulateOptions& options) {
  command.footer(kFooter);
  declare_shape_options(command, options.shape);
  const auto add = [&](const char* name, auto& value, const char* what, const char* type) {
    return command.add_option(name, value, what)->capture_default_str()->type_name(type);
  };
  const auto add_ms = [&](const char* name, auto& value, const char* what) {
    require_range(*add(name, value, what, "MS"), 0, kMostMilliseconds);
  };
  const auto add_mib = [&](const char* name, auto& value, const char* what) {
    require_range(*add(name, value, what, "MIB"), 0, kMostMebibytes);
  };
  const auto add_gbs = [&](const char* name, auto& value, const char* what) {
    require_range(*add(name, value, what, "GB/S"), kLeastRate, kMostRate);
  };
  command.add_flag("--dw", options.shape.delay_weight_gradients, "Delay weight gradients (a zero-bubble order)");
  add("--layers", options.layers, "Layers of a chunk, each a graphed call", "N");
  add_ms("--forward-ms", options.forward_ms, "Time of a layer's forward");
  add_ms("--backward-ms", options.backward_ms, "Time of a layer's backward");
  add_ms("--weights-ms", options.weights_ms,
         "With --dw: the part of --backward-ms for weight gradients (default: half)");
  add_ms("--send-ms", options.send_ms, "Time to send a chunk's output or gradient to the next virtual stage");
  add_mib("--saved-mib", options.saved_mib, "What a layer saves for its backward");
  add_mib("--offloadable-mib", options.offloadable_mib, "The part of --saved-mib that is offloaded; 0: no offload");
  add_mib("--for-weights-mib", options.for_weights_mib,
          "With --dw: what a layer keeps from its backward until its weight gradients (default: as --saved-mib)");
  add_mib("--chunk-mib", options.chunk_mib, "What a chunk keeps until its backward's end, in addition to its layers");
  add_mib("--forward-more-mib", options.forward_more_mib, "What a layer's forward takes at its peak, in addition");
  add_mib("--backward-more-mib", options.backward_more_mib, "What a layer's backward takes at its peak, in addition");
  add_gbs("--to-host-gbs", options.to_host_gbs, "Rate of the link to the host");
  add_gbs("--to-device-gbs", options.to_device_gbs, "Rate of the link to the device");
  add_mib("--lag-mib", options.lag_mib, "Options::lag (default: as the engine chooses on a GPU)");
  add_mib("--lookahead-mib", options.lookahead_mib, "Options::lookahead (default: likewise)");
  add("--alone", options.alone, "Simulate this rank only, as if it never waited for others", "R");
  add("--json", options.json, "Write the figures into this file", "FILE");
  add("--trace", options.trace, "Write a timeline for Perfetto into this file (Chrome's trace events)", "FILE");
  add("--svg", options.svg, "Draw the timeline into this file", "FILE");
}

int simulate(SimulateOptions options) {
  require_group_fits(options.shape);
  require_consistent(options);
  require_own_files({{"--json", options.json}, {"--trace", options.trace}, {"--svg", options.svg}});
  const PipelineCosts costs = costs_of(options);
  const SimulatedRanks ranks = simulated(options, costs);
  PipelineCosts plain = costs;
  plain.offloadable_bytes = 0;
  const std::string title = title_of(options);
  const std::string all = totals(ranks, simulated(options, plain).ranks.front().seconds);
  if (!options.json.empty()) {
    ReportFile(options.json, "--json").commit(json_of(ranks, costs));
  }
  if (!options.trace.empty()) {
    ReportFile(options.trace, "--trace").commit(trace_of(ranks));
  }
  if (!options.svg.empty()) {
    ReportFile(options.svg, "--svg").commit(picture_of(ranks, title, all));
  }
  print(title + "\n\n" + table(ranks) + "\n" + all +
        "\nTimes in ms, live memory in MiB above weights. Bubble: the rank waits for other ranks. Exposed: its layers "
        "wait for "
        "copies.\n");
  return 0;
}

}  // namespace sidestream::cli
