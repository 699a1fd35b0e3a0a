#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "sidestream/pipeline_forecast.h"

namespace CLI {
class App;
}

namespace sidestream::cli {

/// What `sidestream simulate` was asked for. The costs are those of a layer that was measured: see the command's help.
struct SimulateOptions {
  PipelineShape shape{4, 1, 8};
  std::int64_t layers = 3;
  double forward_ms = 7.1;
  double backward_ms = 15.6;
  std::optional<double> weights_ms;  ///< of the backward; not set: half of it
  double send_ms = 0;
  double saved_mib = 1313;
  double offloadable_mib = 353;
  std::optional<double> for_weights_mib;  ///< not set: all that is saved
  double chunk_mib = 128;
  double forward_more_mib = 0;
  double backward_more_mib = 641;
  double to_host_gbs = 55.3;
  double to_device_gbs = 55.4;
  std::optional<double> lag_mib;
  std::optional<double> lookahead_mib;
  std::optional<std::int64_t> alone;  ///< the only rank; it never waits for others
  std::filesystem::path json;         ///< files to write; empty: none
  std::filesystem::path trace;
  std::filesystem::path svg;
};

/// Ranks that were simulated.
struct SimulatedRanks {
  PipelineShape shape;
  std::int64_t first = 0;  ///< rank
  std::vector<RankForecast> ranks;
};

/// Declares the options of `sidestream simulate` on `command`; parsing fills `options`, which must outlive it.
void declare_simulate_options(CLI::App& command, SimulateOptions& options);

/// `sidestream simulate`: what a step of a pipeline will take, on stdout and in files. Returns the exit code.
/// Throws: UsageError for an order that is not defined, for costs out of range, and for a file that cannot be written.
[[nodiscard]] int simulate(SimulateOptions options);

}  // namespace sidestream::cli
