#include "tools/cli/training_options.h"

#include <algorithm>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <CLI/Validators.hpp>

#include "sidestream/error.h"
#include "sidestream/testing/schedule.h"
#include "tools/cli/trained_model.h"

namespace sidestream::cli {
namespace {

void require_positive(const char* option, std::int64_t value, std::int64_t most) {
  if (value < 1 || value > most) {
    throw UsageError(fmt::format("{} is {}; it must be from 1 to {}", option, value, most));
  }
}

void require_divides(const char* whole_name, std::int64_t whole, const char* part_name, std::int64_t part) {
  if (whole % part != 0) {
    throw UsageError(fmt::format("{} {} does not divide by {} {}; {} or {} would", whole_name, whole, part_name, part,
                                 std::max(part, whole / part * part), (whole / part + 1) * part));
  }
}

void validate_shape(const ModelShape& shape) {
  require_positive("--layers", shape.layers, 1024);
  require_positive("--hidden", shape.hidden, 1 << 20);
  require_positive("--heads", shape.heads, 4096);
  require_positive("--kv-heads", shape.kv_heads, 4096);
  require_positive("--ffn", shape.ffn, 1 << 22);
  require_positive("--seq", shape.seq, 1 << 22);
  require_divides("--hidden", shape.hidden, "--heads", shape.heads);
  require_divides("--heads", shape.heads, "--kv-heads", shape.kv_heads);
  if (shape.head_dim() % 2 != 0) {
    throw UsageError(
        fmt::format("--hidden {} over --heads {} gives heads of {} numbers; rotary positions need an even number: use "
                    "--hidden {} or other --heads",
                    shape.hidden, shape.heads, shape.head_dim(), shape.hidden + shape.heads));
  }
}

void validate_mixture(const TrainingOptions& options) {
  constexpr double kMostCapacity = 1024;
  if (!options.mixture()) {
    if (options.experts || options.top_k || options.capacity) {
      throw UsageError("--experts, --top-k and --capacity say how a mixture of experts is made: use --model moe");
    }
    return;
  }
  const MixtureShape shape = mixture_shape(options);
  require_positive("--experts", shape.experts, 4096);
  require_positive("--top-k", shape.top_k, shape.experts);
  if (!(shape.capacity >= 0 && shape.capacity <= kMostCapacity)) {
    throw UsageError(fmt::format("--capacity is {}; it must be 0 (none) or up to {}", shape.capacity, kMostCapacity));
  }
  if ((options.graph_mode() == "layer" || options.graphs_step()) && shape.capacity == 0) {
    throw UsageError(
        fmt::format("--model moe --graphs {}: how many bytes an expert gets depends on the data, which no graph can "
                    "follow; give fixed shapes by --capacity 1.25 (bytes beyond it go to no expert), or use --graphs "
                    "partial",
                    options.graph_mode()));
  }
}

void validate_delay(const TrainingOptions& options) {
  if (options.delay == "on" && !options.delays()) {
    throw UsageError(
        fmt::format("--delay on with {}: there is no eager part of a layer that leaves behind the next graph; use "
                    "--graphs partial and offload",
                    options.offloads() ? "--graphs " + options.graph_mode() : "--offload off"));
  }
  if (options.delay == "on" && delay_patterns(options).empty()) {
    throw UsageError(
        "--delay on: no scope that --offload names is one of the eager part of a layer; name such scopes, not "
        "patterns, "
        "or offload all");
  }
}

void validate_microbatches(const TrainingOptions& options) {
  require_positive("--microbatches", options.microbatches, options.batch);
  require_divides("--batch", options.batch, "--microbatches", options.microbatches);
}

/// What a step's graph has no use for.
void validate_whole_step(const TrainingOptions& options) {
  if (options.graphs_step() && options.lookahead_mib) {
    throw UsageError(
        "--lookahead-mib with --graphs step: inside of a step's graph groups come back one ahead of backward; leave it "
        "out, or use --graphs layer");
  }
}

}  // namespace

void declare_model_options(CLI::App& command, TrainingOptions& options) {
  // The last one counts: a script may put its own defaults before what it is given.
  command.option_defaults()->take_last();
  command.add_option("--text", options.text, "Files to train on (default: the texts of /usr/share/common-licenses)")
      ->take_all()
      ->type_name("FILE");
  command
      .add_option("--model", options.model, "dense, or moe: a mixture of experts in place of each feed-forward layer")
      ->check(CLI::IsMember({"dense", "moe"}))
      ->type_name("NAME")
      ->capture_default_str();
  command.add_option("--experts", options.experts, "moe: experts of a layer (default: 4)")->type_name("N");
  command.add_option("--top-k", options.top_k, "moe: experts that each byte is given to (default: 2)")->type_name("N");
  command
      .add_option("--capacity", options.capacity,
                  "moe: each expert takes this part of an even share and no more, so that shapes are fixed; 0 (the "
                  "default): all that is given to it")
      ->type_name("PART");
  command.add_option("--layers", options.shape.layers, "Transformer layers")->type_name("N")->capture_default_str();
  command.add_option("--hidden", options.shape.hidden, "Width of the model")->type_name("N")->capture_default_str();
  command.add_option("--heads", options.shape.heads, "Attention heads")->type_name("N")->capture_default_str();
  command.add_option("--kv-heads", options.shape.kv_heads, "Key and value heads, shared by groups of heads")
      ->type_name("N")
      ->capture_default_str();
  command.add_option("--ffn", options.shape.ffn, "Inner width of the SwiGLU, or of each expert")
      ->type_name("N")
      ->capture_default_str();
  command.add_option("--seq", options.shape.seq, "Bytes in a window")->type_name("N")->capture_default_str();
  command.add_option("--batch", options.batch, "Windows in a step")->type_name("N")->capture_default_str();
  command
      .add_option("--microbatches", options.microbatches,
                  "Parts that a step's windows are given in, one after the other; their gradients add up")
      ->type_name("N")
      ->capture_default_str();
  command.add_option("--dtype", options.dtype, "Of parameters and activations: float32 or bfloat16")
      ->check(CLI::IsMember({"float32", "bfloat16"}))
      ->type_name("NAME")
      ->capture_default_str();
  command.add_option("--steps", options.steps, "Optimizer steps")->type_name("N")->capture_default_str();
  command.add_option("--seed", options.seed, "Of weights and of the order of windows")
      ->type_name("N")
      ->capture_default_str();
  command
      .add_option("--offload", options.offload,
                  fmt::format("What leaves the device: all, off, or a comma-separated list of scopes ({}; moe: {}) or "
                              "name patterns",
                              fmt::join(scopes_of("dense"), ", "), fmt::join(scopes_of("moe"), ", ")))
      ->delimiter(',')
      ->allow_extra_args(false)
      ->trigger_on_parse()
      ->type_name("NAMES")
      ->default_str("all");
  command
      .add_option(
          "--graphs", options.graphs,
          "step (one graph of forward, backward and optimizer), layer (one graph a layer and direction), partial "
          "(attention alone, in a mixture with its router; the rest of a layer runs eagerly) or off")
      ->check(CLI::IsMember({"step", "layer", "partial", "off"}))
      ->type_name("NAME")
      ->default_str("layer; moe: partial");
  command
      .add_option("--delay", options.delay,
                  "on: what leaves of the eager part of a layer is copied beside the next graph; off: at once")
      ->check(CLI::IsMember({"on", "off"}))
      ->type_name("NAME")
      ->default_str("on");
  command.add_option("--side-streams", options.side_streams, "Streams that consecutive graphs rotate over")
      ->type_name("K")
      ->capture_default_str();
  command
      .add_option(
          "--lag-mib", options.lag_mib,
          "How far copies to the host may trail, in MiB of device memory (default: by K and the link; two groups)")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20))
      ->type_name("MIB");
  command
      .add_option("--lookahead-mib", options.lookahead_mib,
                  "How far copies back may run ahead of backward, in MiB beyond the lag's")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 20))
      ->type_name("MIB");
}

void declare_training_options(CLI::App& command, TrainingOptions& options) {
  declare_model_options(command, options);
  command.add_option("--device", options.device, "auto (cuda where there is one, else sim), cuda or sim")
      ->check(CLI::IsMember({"auto", "cuda", "sim"}))
      ->type_name("NAME")
      ->capture_default_str();
  command
      .add_option(
          "--schedule", options.schedule,
          "Order of queued work on the sim device: early, late, d2h-early, d2h-late, seed:N, starve:N or hold:N")
      ->type_name("NAME");
  command.add_flag("--compare", options.compare,
                   "Repeat every step in plain eager mode, compare the gradients of every parameter, and measure each "
                   "mode by itself");
  command.add_option("--report", options.report, "Write the results as JSON")->type_name("FILE");
  command
      .add_option("--check-steps", options.check_steps,
                  "Journal the first N steps and report accesses that nothing orders; 0: off")
      ->type_name("N")
      ->capture_default_str();
  command
      .add_option(
          "--verify-replays", options.verify_replays,
          "Run the first N replays of each layer, and then one in a hundred, eagerly as well, and fail where outputs "
          "or gradients differ (--graphs step: losses); 0: off")
      ->type_name("N")
      ->capture_default_str();
  command
      .add_flag(
          "--find-syncs", options.find_syncs,
          "Find what makes the host wait in steps (values read, results whose shape depends on data, blocking copies, "
          "synchronisations, and memory asked of the driver in steady steps), with its place and a remedy")
      ->envname("SIDESTREAM_FIND_SYNCS");
  command.add_option("--journal", options.journal, "Write the checked steps' journal (see sidestream check)")
      ->type_name("FILE");
  command
      .add_option("--dump-graphs", options.dump_graphs,
                  "Draw each captured graph into a file of this folder, for Graphviz (dot -Tsvg FILE)")
      ->type_name("DIR");
}

void validate(const TrainingOptions& options) {
  validate_shape(options.shape);
  validate_mixture(options);
  validate_delay(options);
  require_positive("--batch", options.batch, 1 << 20);
  validate_microbatches(options);
  validate_whole_step(options);
  require_positive("--steps", options.steps, 1'000'000'000);
  require_positive("--side-streams", options.side_streams, 32);
  if (options.check_steps < 0) {
    throw UsageError(fmt::format("--check-steps is {}; it must be 0 (off) or more", options.check_steps));
  }
  if (!options.journal.empty() && options.journal == options.report) {
    throw UsageError(
        fmt::format("--report and --journal are both '{}'; give each its own file", options.report.string()));
  }
  if (!options.journal.empty() && options.check_steps == 0) {
    throw UsageError("--journal without --check-steps: say how many steps to write, for example --check-steps 10");
  }
  if (options.check_steps > 0 && !options.graphed() && !options.offloads()) {
    throw UsageError("--check-steps with neither graphs nor offload: the engine has nothing to order");
  }
  if (options.verify_replays < 0) {
    throw UsageError(fmt::format("--verify-replays is {}; it must be 0 (off) or more", options.verify_replays));
  }
  if (!options.dump_graphs.empty() && !options.graphed()) {
    throw UsageError("--dump-graphs draws captured graphs; with --graphs off there are none: leave one of the two out");
  }
  if (options.verify_replays > 0 && !options.graphed()) {
    throw UsageError(
        "--verify-replays without graphs: nothing is replayed; leave it out, or use --graphs step, layer or partial");
  }
  if (options.find_syncs && !options.graphed() && !options.offloads()) {
    throw UsageError(
        "--find-syncs (or SIDESTREAM_FIND_SYNCS=1) with neither graphs nor offload: there is no engine, which is what "
        "finds them");
  }
  if (options.find_syncs && options.compare) {
    throw UsageError(
        "--find-syncs (or SIDESTREAM_FIND_SYNCS=1) with --compare: the comparison reads each gradient on the host in "
        "the middle of the step; give one of the two");
  }
  if (!options.schedule.empty()) {
    if (options.device == "cuda") {
      throw UsageError(
          "--schedule chooses the order of work on the sim device; a GPU has its own: leave it out, or use --device "
          "sim");
    }
    (void)Schedule::parse(options.schedule);
  }
  (void)offload_patterns(options);
}

}  // namespace sidestream::cli
