#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "examples/byte_model/byte_model.h"
#include "sidestream/pipeline_order.h"

namespace CLI {
class App;
}

namespace sidestream::cli {

using byte_model::ModelShape;

/// What `sidestream train` was asked for.
struct TrainingOptions {
  std::vector<std::filesystem::path> text;  ///< empty: the default text
  std::string device = "auto";
  std::string model = "dense";
  ModelShape shape;
  // Of a mixture; not given: as MixtureShape has them.
  std::optional<std::int64_t> experts;
  std::optional<std::int64_t> top_k;
  std::optional<double> capacity;
  std::int64_t batch = 6;
  std::int64_t microbatches = 1;   ///< that a step's windows are given in
  std::optional<std::int64_t> pp;  ///< ranks of a pipeline; not set: no pipeline
  std::int64_t vpp = 1;            ///< virtual stages of a rank
  bool delay_weight_gradients = false;
  std::int64_t rank_timeout = 300;  ///< seconds
  std::string dtype = "float32";
  std::int64_t steps = 200;
  std::uint64_t seed = 1;
  std::vector<std::string> offload{"all"};
  std::string graphs;                        ///< empty: as `graph_mode` says
  std::string delay;                         ///< empty: on where part of each layer is graphed
  std::optional<std::int64_t> side_streams;  ///< not set: the library's default
  std::optional<std::int64_t> device_budget_mib;
  std::optional<std::int64_t> lag_mib;
  std::optional<std::int64_t> lookahead_mib;
  std::string schedule;  ///< empty: the device's own
  bool compare = false;
  std::filesystem::path report;  ///< empty: none
  std::int64_t check_steps = 0;
  std::int64_t verify_replays = 0;
  bool find_syncs = false;
  std::filesystem::path journal;      ///< of the checked steps; empty: none
  std::filesystem::path trace;        ///< of one step; empty: none
  std::filesystem::path dump_graphs;  ///< a folder for drawings; empty: none

  /// Of the model, in a pipeline.
  [[nodiscard]] std::int64_t parts() const noexcept { return pp.value_or(1) * vpp; }
  /// With `pp`.
  [[nodiscard]] PipelineShape pipeline() const {
    return {pp.value_or(1), vpp, microbatches, /*group=*/0, delay_weight_gradients};
  }
  [[nodiscard]] bool mixture() const noexcept { return model == "moe"; }
  /// "step", "layer", "partial" or "off".
  [[nodiscard]] std::string graph_mode() const { return !graphs.empty() ? graphs : mixture() ? "partial" : "layer"; }
  [[nodiscard]] bool graphed() const { return graph_mode() != "off"; }
  [[nodiscard]] bool graphs_step() const { return graph_mode() == "step"; }
  [[nodiscard]] bool delays() const { return graph_mode() == "partial" && offloads() && delay != "off"; }
  [[nodiscard]] bool offloads() const noexcept { return offload != std::vector<std::string>{"off"}; }
  [[nodiscard]] std::int64_t tokens_per_step() const noexcept { return batch * shape.seq; }
};

/// Declares the options that say what is trained and how it is placed; parsing fills `options`, which must outlive it.
void declare_model_options(CLI::App& command, TrainingOptions& options);
/// Declares all options of `sidestream train`.
void declare_training_options(CLI::App& command, TrainingOptions& options);

/// Throws: UsageError with the remedy when sizes do not divide, a number is out of range or a name is unknown.
void validate(const TrainingOptions& options);

}  // namespace sidestream::cli
