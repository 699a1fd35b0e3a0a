#include "tools/cli/training_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <CLI/Validators.hpp>

#include "sidestream/error.h"
#include "sidestream/pipeline_order.h"
#include "sidestream/testing/schedule.h"
#include "tools/cli/report_file.h"
#include "tools/cli/trained_model.h"

namespace sidestream::cli {
namespace {

constexpr std::int64_t kMostWindows = 1 << 20;  ///< of a step

void require_positive(const char* option, std::int64_t value, std::int64_t most) {
  if (value < 1 || value > most) {
    throw UsageError(fmt::format("{} is {}; it must be from 1 to {}", option, value, most));
  }
}

void require_divides(const char* whole_name, std::int64_t whole, const char* part_name, std::int64_t part) {
  if (whole % part != 0) {
    const std::int64_t below = whole / part * part;
    throw UsageError(fmt::format("{} {} is not divisible by {} {}; {}{} would be", whole_name, whole, part_name, part,
                                 below > 0 ? fmt::format("{} or ", below) : std::string(), below + part));
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
      throw UsageError("--experts, --top-k and --capacity work only with a mixture of experts: add --model moe");
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
    throw UsageError(fmt::format(
        "--model moe --graphs {}: the number of bytes for an expert depends on the data, but a graph needs fixed "
        "shapes. Fix them with --capacity 1.25 (bytes beyond the capacity go to no expert), or use --graphs partial",
        options.graph_mode()));
  }
}

void validate_delay(const TrainingOptions& options) {
  if (options.delay == "on" && !options.delays()) {
    throw UsageError(fmt::format(
        "--delay on with {}: no layer has an eager part that is offloaded; use --graphs partial and --offload",
        options.offloads() ? "--graphs " + options.graph_mode() : "--offload off"));
  }
  if (options.delay == "on" && delay_patterns(options).empty()) {
    throw UsageError(
        "--delay on: --offload names no scope of the eager part of a layer; name such scopes, not patterns, or use "
        "--offload all");
  }
}

void validate_microbatches(const TrainingOptions& options) {
  require_positive("--microbatches", options.microbatches, options.batch);
  require_divides("--batch", options.batch, "--microbatches", options.microbatches);
}

void validate_pipeline(const TrainingOptions& options) {
  if (!options.pp) {
    if (options.vpp != 1) {
      throw UsageError("--vpp gives each rank of a pipeline several virtual stages: add --pp, the number of ranks");
    }
    if (options.delay_weight_gradients) {
      throw UsageError("--dw delays the weight gradients of a pipeline: add --pp, the number of ranks");
    }
    return;
  }
  require_positive("--pp", *options.pp, 64);
  require_positive("--vpp", options.vpp, 64);
  require_positive("--rank-timeout", options.rank_timeout, 1'000'000);
  const auto refuse = [](bool given, const char* option, const char* remedy) {
    if (given) {
      throw UsageError(fmt::format("{} does not work with --pp: {}", option, remedy));
    }
  };
  refuse(options.mixture(), "--model moe", "only --model dense can be cut into parts");
  refuse(options.graphs_step(), "--graphs step",
         "a step's graph cannot wait for other ranks; use --graphs layer, partial or off");
  refuse(options.check_steps > 0, "--check-steps", "the order check is for one process; leave out one of the two");
  refuse(options.find_syncs, "--find-syncs",
         "tensors pass between ranks through the host, which waits for each; leave out one of the two");
  refuse(!options.dump_graphs.empty(), "--dump-graphs",
         "all ranks would write the same files; leave out one of the two");
  if (options.delay_weight_gradients && !options.graphed()) {
    throw UsageError("--dw delays the weight gradients of graphed layers, but --graphs is off: use --graphs layer");
  }
  if (options.shape.layers < options.parts()) {
    throw UsageError(fmt::format(
        "--layers {} is too few for --pp {} --vpp {}: each of the {} parts needs a layer; use --layers {} or more",
        options.shape.layers, *options.pp, options.vpp, options.parts(), options.parts()));
  }
  (void)pipeline_order(options.pipeline(), 0);
}

/// What a step's graph has no use for.
void validate_whole_step(const TrainingOptions& options) {
  if (options.graphs_step() && options.lookahead_mib) {
    throw UsageError(
        "--lookahead-mib has no effect with --graphs step: inside a step's graph, each group is reloaded one group "
        "ahead of backward. Leave it out, or use --graphs layer");
  }
}

/// The library refuses the rest.
void validate_budget(const TrainingOptions& options) {
  if (options.device_budget_mib && (!options.offloads() || !options.graphed() || options.graphs_step())) {
    throw UsageError(fmt::format(
        "--device-budget-mib with {}: the plan says which saved tensors of graphed layers are offloaded; use --graphs "
        "layer or partial, and --offload all or the scopes that may be offloaded",
        options.offloads() ? "--graphs " + options.graph_mode() : "--offload off"));
  }
  if (options.device_budget_mib && (options.lag_mib || options.lookahead_mib)) {
    throw UsageError(
        "--device-budget-mib is given with --lag-mib or --lookahead-mib, which its plan chooses; leave them out");
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
  command.add_option("--experts", options.experts, "moe: number of experts in a layer (default: 4)")->type_name("N");
  command.add_option("--top-k", options.top_k, "moe: number of experts that each byte is sent to (default: 2)")
      ->type_name("N");
  command
      .add_option("--capacity", options.capacity,
                  "moe: most bytes that an expert takes, as a multiple of an even share; a limit makes shapes fixed. 0 "
                  "(the default): no limit")
      ->type_name("PART");
  command.add_option("--layers", options.shape.layers, "Transformer layers")->type_name("N")->capture_default_str();
  command.add_option("--hidden", options.shape.hidden, "Width of the model")->type_name("N")->capture_default_str();
  command.add_option("--heads", options.shape.heads, "Attention heads")->type_name("N")->capture_default_str();
  command
      .add_option("--kv-heads", options.shape.kv_heads, "Key and value heads; each serves a group of attention heads")
      ->type_name("N")
      ->capture_default_str();
  command.add_option("--ffn", options.shape.ffn, "Inner width of the SwiGLU, or of each expert")
      ->type_name("N")
      ->capture_default_str();
  command.add_option("--seq", options.shape.seq, "Bytes in a window")->type_name("N")->capture_default_str();
  command
      .add_option("--batch", options.batch,
                  fmt::format("Windows in a step (default: {}, or the next multiple of --microbatches)", options.batch))
      ->type_name("N");
  command
      .add_option("--microbatches", options.microbatches,
                  "Split each step's windows into N microbatches; their gradients are accumulated")
      ->type_name("N")
      ->capture_default_str();
  command.add_option("--dtype", options.dtype, "Type of parameters and activations: float32 or bfloat16")
      ->check(CLI::IsMember({"float32", "bfloat16"}))
      ->type_name("NAME")
      ->capture_default_str();
  command.add_option("--steps", options.steps, "Optimizer steps")->type_name("N")->capture_default_str();
  command.add_option("--seed", options.seed, "Seed of the weights and of the order of windows")
      ->type_name("N")
      ->capture_default_str();
  command
      .add_option(
          "--offload", options.offload,
          fmt::format("What to offload: all, off, or a comma-separated list of scopes ({}; moe: {}) or name patterns",
                      fmt::join(scopes_of("dense"), ", "), fmt::join(scopes_of("moe"), ", ")))
      ->delimiter(',')
      ->allow_extra_args(false)
      ->trigger_on_parse()
      ->type_name("NAMES")
      ->default_str("all");
  command
      .add_option(
          "--graphs", options.graphs,
          "step: one graph of forward, backward and optimizer; layer: one graph per layer and direction; partial: "
          "graphs of attention (with --model moe also of the router), the rest of a layer runs eagerly; off: no graphs")
      ->check(CLI::IsMember({"step", "layer", "partial", "off"}))
      ->type_name("NAME")
      ->default_str("layer; moe: partial");
  command
      .add_option("--delay", options.delay,
                  "on: offloaded tensors of a layer's eager part are copied while the next graph runs; off: they are "
                  "copied immediately")
      ->check(CLI::IsMember({"on", "off"}))
      ->type_name("NAME")
      ->default_str("on");
  command
      .add_option("--side-streams", options.side_streams,
                  "Number of streams that consecutive graphs rotate over (default: 1)")
      ->type_name("K");
  command
      .add_option("--device-budget-mib", options.device_budget_mib,
                  "Live device memory in MiB that a step may take, weights included. The engine offloads no more than "
                  "that asks for")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 30))
      ->type_name("MIB");
  command
      .add_option(
          "--lag-mib", options.lag_mib,
          "Device memory in MiB that may wait for its copy to the host (default: what two groups save; with graphs: "
          "what two calls save, on a GPU more if that removes waits; with --side-streams K: what K calls save)")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20))
      ->type_name("MIB");
  command
      .add_option("--lookahead-mib", options.lookahead_mib,
                  "How far reloads may run ahead of backward, in MiB beyond the lag")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 20))
      ->type_name("MIB");
  command.parse_complete_callback([&command, &options] {
    if (command.count("--batch") == 0 && options.microbatches > 0) {
      require_positive("--microbatches", options.microbatches, kMostWindows);  // before the batch is rounded up
      options.batch = (options.batch + options.microbatches - 1) / options.microbatches * options.microbatches;
    }
  });
}

void declare_training_options(CLI::App& command, TrainingOptions& options) {
  declare_model_options(command, options);
  command.add_option("--device", options.device, "auto (cuda if there is a GPU, else sim), cuda or sim")
      ->check(CLI::IsMember({"auto", "cuda", "sim"}))
      ->type_name("NAME")
      ->capture_default_str();
  command
      .add_option(
          "--schedule", options.schedule,
          "Order of queued work on the sim device: early, late, d2h-early, d2h-late, seed:N, starve:N or hold:N")
      ->type_name("NAME");
  command
      .add_option(
          "--pp", options.pp,
          "Train in a pipeline of N ranks, one process each. They are started here, or by the environment "
          "(RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). With --device cuda each has a GPU of its own; "
          "auto is sim")
      ->type_name("N");
  command.add_option("--vpp", options.vpp, "Virtual stages of each rank of the pipeline: the interleaved order")
      ->type_name("N")
      ->capture_default_str();
  command.add_flag("--dw", options.delay_weight_gradients,
                   "Delay the weight gradients of the pipeline's graphed layers: a zero-bubble order");
  command
      .add_option("--rank-timeout", options.rank_timeout,
                  "How many seconds a rank waits for another one before the run fails")
      ->type_name("N")
      ->capture_default_str();
  command.add_flag("--compare", options.compare,
                   "Repeat every step in plain eager mode and compare the gradients of every parameter; then measure "
                   "each mode alone");
  command.add_option("--report", options.report, "Write the results as JSON")->type_name("FILE");
  command
      .add_option(
          "--check-steps", options.check_steps,
          "Record the stream operations of the first N steps and report memory accesses that nothing orders; 0: off")
      ->type_name("N")
      ->envname("SIDESTREAM_CHECK_STEPS")
      ->capture_default_str();
  command
      .add_option("--verify-replays", options.verify_replays,
                  "Repeat the first N replays of each layer eagerly, and then one in a hundred; fail if outputs or "
                  "gradients differ (--graphs step: if losses differ); 0: off")
      ->type_name("N")
      ->envname("SIDESTREAM_VERIFY_REPLAYS")
      ->capture_default_str();
  command
      .add_flag("--find-syncs", options.find_syncs,
                "Report what makes the host wait in steps, with the place and a remedy: values read, results whose "
                "shape depends on data, blocking copies, synchronisations, and memory requested from the driver after "
                "the first steps")
      ->envname("SIDESTREAM_FIND_SYNCS");
  command.add_option("--journal", options.journal, "Write the journal of the checked steps, for sidestream check")
      ->type_name("FILE");
  command
      .add_option(
          "--trace", options.trace,
          "Write when graphs and copies of one step ran, and the device's memory, for Perfetto (ui.perfetto.dev) and "
          "tools/draw_memory.py; with --compare of each mode, with --pp of each rank")
      ->type_name("FILE");
  command
      .add_option("--dump-graphs", options.dump_graphs,
                  "Draw each captured graph into a file in this folder, for Graphviz (dot -Tsvg FILE)")
      ->type_name("DIR");
}

void validate_files(const TrainingOptions& options) {
  const std::vector<NamedFile> outputs{
      {"--report", options.report}, {"--journal", options.journal}, {"--trace", options.trace}};
  require_own_files(outputs);
  for (const std::filesystem::path& text : options.text) {
    for (const NamedFile& output : outputs) {
      require_own_files({{"--text", text}, output});
    }
  }
  if (!options.trace.empty() && options.graphs_step()) {
    throw UsageError(
        "--trace shows the graphs of layers, but --graphs step captures one for the whole step; leave out "
        "one of the two");
  }
  if (!options.trace.empty() && !options.graphed() && !options.offloads()) {
    throw UsageError("--trace needs graphs or offload: without them there is nothing to show");
  }
}

void validate(const TrainingOptions& options) {
  validate_shape(options.shape);
  validate_mixture(options);
  validate_delay(options);
  require_positive("--batch", options.batch, kMostWindows);
  validate_microbatches(options);
  validate_whole_step(options);
  validate_budget(options);
  validate_pipeline(options);
  require_positive("--steps", options.steps, 1'000'000'000);
  require_positive("--side-streams", options.side_streams.value_or(1), 32);
  if (options.check_steps < 0) {
    throw UsageError(fmt::format("--check-steps is {}; it must be 0 (off) or more", options.check_steps));
  }
  validate_files(options);
  if (!options.journal.empty() && options.check_steps == 0) {
    throw UsageError("--journal needs --check-steps, the number of steps to write, for example --check-steps 10");
  }
  if (options.check_steps > 0 && !options.graphed() && !options.offloads()) {
    throw UsageError("--check-steps needs graphs or offload: without them there is nothing to order");
  }
  if (options.verify_replays < 0) {
    throw UsageError(fmt::format("--verify-replays is {}; it must be 0 (off) or more", options.verify_replays));
  }
  if (!options.dump_graphs.empty() && !options.graphed()) {
    throw UsageError("--dump-graphs draws captured graphs, but --graphs off captures none; leave out one of the two");
  }
  if (options.verify_replays > 0 && !options.graphed()) {
    throw UsageError(
        "--verify-replays needs graphs, because without them nothing is replayed; leave it out, or use --graphs step, "
        "layer or partial");
  }
  if (options.find_syncs && !options.graphed() && !options.offloads()) {
    throw UsageError(
        "--find-syncs (or SIDESTREAM_FIND_SYNCS=1) needs graphs or offload: without them there is no engine to find "
        "synchronisations");
  }
  if (options.find_syncs && options.compare) {
    throw UsageError(
        "--find-syncs (or SIDESTREAM_FIND_SYNCS=1) cannot be used with --compare, which reads each gradient on the "
        "host during the step; give one of the two");
  }
  if (!options.schedule.empty()) {
    if (options.device == "cuda") {
      throw UsageError(
          "--schedule sets the order of work on the sim device and does not work on a GPU; leave it out, or use "
          "--device sim");
    }
    (void)Schedule::parse(options.schedule);
  }
  (void)offload_patterns(options);
}

}  // namespace sidestream::cli
