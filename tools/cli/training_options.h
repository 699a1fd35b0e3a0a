#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "examples/byte_model/byte_model.h"

namespace CLI {
class App;
}

namespace sidestream::cli {

using byte_model::BlockImpl;
using byte_model::ByteModel;
using byte_model::ModelShape;

/// What `sidestream train` was asked for.
struct TrainingOptions {
  std::vector<std::filesystem::path> text;  ///< empty: the default text
  std::string device = "auto";
  ModelShape shape;
  std::int64_t batch = 6;
  std::string dtype = "float32";
  std::int64_t steps = 200;
  std::uint64_t seed = 1;
  std::vector<std::string> offload{"all"};
  std::string graphs = "layer";
  std::int64_t side_streams = 2;
  std::optional<std::int64_t> lag_mib;
  std::optional<std::int64_t> lookahead_mib;
  std::string schedule;  ///< empty: the device's own
  bool compare = false;
  std::filesystem::path report;  ///< empty: none
  std::int64_t check_steps = 0;
  std::int64_t verify_replays = 0;
  bool find_syncs = false;
  std::filesystem::path journal;      ///< of the checked steps; empty: none
  std::filesystem::path dump_graphs;  ///< a folder for drawings; empty: none

  [[nodiscard]] bool graphed() const noexcept { return graphs == "layer"; }
  [[nodiscard]] bool offloads() const noexcept { return offload != std::vector<std::string>{"off"}; }
  [[nodiscard]] std::int64_t tokens_per_step() const noexcept { return batch * shape.seq; }
};

/// Declares the options that say what is trained and how it is placed; parsing fills `options`, which must outlive it.
void declare_model_options(CLI::App& command, TrainingOptions& options);
/// Declares all options of `sidestream train`.
void declare_training_options(CLI::App& command, TrainingOptions& options);

/// Throws: UsageError with the remedy when sizes do not divide, a number is out of range or a name is unknown.
void validate(const TrainingOptions& options);

/// The name patterns that --offload stands for: "all" is everything inside the graphed layers, a bare scope name is that scope of
/// every layer, a name with dots or wildcards is taken as it stands. Empty for "off".
/// Throws: UsageError that lists the scopes there are, for a bare name that is none of them, and for no name.
[[nodiscard]] std::vector<std::string> offload_patterns(const std::vector<std::string>& names);

}  // namespace sidestream::cli
