#include "tools/cli/training_run.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include "sidestream/engine.h"
#include "sidestream/graphed_step.h"
#include "sidestream/options.h"
#include "sidestream/owning.h"
#include "sidestream/report.h"
#include "tools/cli/optimizer.h"
#include "tools/cli/trained_model.h"
#include "tools/cli/window_order.h"

namespace sidestream::cli {
namespace {

constexpr double kLearningRate = 3e-3;
constexpr double kWeightDecay = 0.01;
constexpr std::int64_t kWarmupSteps = 20;
constexpr std::size_t kMinBytes = 4096;  // the default model's activations are far below the library's own limit

at::ScalarType scalar_type(const TrainingOptions& options) {
  return options.dtype == "bfloat16" ? at::kBFloat16 : at::kFloat;
}

/// [windows, bytes a window], int64, on the CPU.
at::Tensor gather(std::span<const std::uint8_t> text, const std::vector<std::size_t>& offsets, std::int64_t window) {
  at::Tensor windows = at::empty({static_cast<std::int64_t>(offsets.size()), window}, at::kLong);
  std::int64_t* out = windows.mutable_data_ptr<std::int64_t>();
  for (const std::size_t offset : offsets) {
    out = std::copy_n(text.data() + offset, window, out);
  }
  return windows;
}

/// Operators of a GPU may add in another order each time.
double verify_tolerance(const TrainingOptions& options, c10::Device device) {
  return GradientComparison(scalar_type(options), options.tokens_per_step(), !device.is_cuda()).bound();
}

std::vector<at::Tensor> tensors(const NamedTensors& named) {
  std::vector<at::Tensor> result;
  std::transform(named.begin(), named.end(), std::back_inserter(result), [](const auto& item) { return item.second; });
  return result;
}

GraphOptions graph_options(const TrainingOptions& options) {
  GraphOptions graphs = GraphOptions().side_streams(options.side_streams);
  if (options.delay_weight_gradients) {
    graphs.gradients("blocks.**", GradientPolicy::delayed);
  }
  return graphs;
}

Options engine_options(const TrainingOptions& options, c10::Device device, TrainingMode mode,
                       ProgressCallback progress) {
  Options engine(device);
  if (mode.graphs && !options.graphs_step()) {
    engine.graph(graph_pattern(options));
  }
  if (mode.offload) {
    for (const std::string& pattern : offload_patterns(options)) {
      engine.offload(pattern);
    }
  }
  if (mode.graphs && mode.offload) {
    for (const std::string& pattern : delay_patterns(options)) {
      engine.delay(pattern);
    }
  }
  if (options.pp) {
    engine.call_options(CallOptions().max_captures(std::max(CallOptions().max_captures(), options.microbatches)));
  }
  engine.check_steps(options.check_steps).progress(std::move(progress));
  engine.verify_replays(options.verify_replays).verify_tolerance(verify_tolerance(options, device));
  engine.find_syncs(options.find_syncs).min_bytes(kMinBytes).graph_options(graph_options(options));
  if (options.lookahead_mib) {
    engine.lookahead(static_cast<std::size_t>(*options.lookahead_mib) << 20);
  }
  if (options.device_budget_mib && mode.graphs && mode.offload) {
    engine.device_budget(static_cast<std::size_t>(*options.device_budget_mib) << 20);
  }
  if (options.lag_mib) {
    engine.lag(static_cast<std::size_t>(*options.lag_mib) << 20);
  }
  return engine;
}

}  // namespace

std::string TrainingMode::name() const {
  if (plain()) {
    return "eager";
  }
  return graphs && offload ? "graphs+offload" : graphs ? "graphs" : "offload";
}

TrainingResult described(const TrainingOptions& options, const TextCorpus& corpus, const std::string& device_name) {
  TrainingResult result;
  result.options = options;
  result.device_name = device_name;
  result.text_source = corpus.source();
  result.text_files = corpus.files();
  result.text_bytes = corpus.bytes();
  result.byte_entropy = corpus.byte_entropy();
  result.mode = TrainingMode{.graphs = options.graphed(), .offload = options.offloads()}.name();
  return result;
}

struct TrainingRun::State {
  State(const TrainingOptions& asked, c10::Device where, TrainingMode as, const TextCorpus& text,
        ProgressCallback progress, std::optional<PipelineRank> place)
      : options(asked),
        device(where),
        mode(as),
        corpus(text),
        rank(std::move(place)),
        model(make_model(asked, where, scalar_type(asked), rank ? rank->parts : std::vector<std::int64_t>())),
        optimizer(tensors(trained()), kWeightDecay, asked.graphs_step()),
        order(text.train().size(), static_cast<std::size_t>(asked.shape.seq) + 1,
              static_cast<std::size_t>(asked.shape.seq), asked.seed) {
    if (!mode.plain()) {
      engine.emplace(*model.module, engine_options(asked, where, mode, std::move(progress)));
    }
  }

  /// Of the next step's text, by microbatch.
  [[nodiscard]] std::vector<Tensors> next_windows() {
    const std::vector<std::size_t> offsets = order.next(static_cast<std::size_t>(options.batch));
    const at::Tensor windows = gather(corpus.train(), offsets, options.shape.seq + 1).to(device);
    std::vector<Tensors> microbatches;
    for (at::Tensor& part : windows.chunk(options.microbatches)) {
      microbatches.push_back({std::move(part)});
    }
    return microbatches;
  }

  /// In a pipeline, the other ranks' parameters are not on the device.
  [[nodiscard]] NamedTensors trained() const {
    NamedTensors parameters;
    for (const auto& item : model.module->named_parameters()) {
      if (!rank || item.value().device() == device) {
        parameters.emplace_back(item.key(), item.value());
      }
    }
    return parameters;
  }

  /// One chunk of a pipeline.
  [[nodiscard]] at::Tensor run_part(std::int64_t part, const at::Tensor& windows, const at::Tensor& input) const {
    const at::Tensor output =
        model.dense->forward_part(part == 0 ? windows.narrow(1, 0, options.shape.seq) : input, part, options.parts());
    return part + 1 == options.parts() ? share(byte_model::ByteModelImpl::loss_of(output, windows)) : output;
  }

  /// Of one microbatch: its part of the step's mean loss.
  [[nodiscard]] at::Tensor part_of_loss(const at::Tensor& windows) const { return share(model.loss(windows)); }
  [[nodiscard]] at::Tensor share(const at::Tensor& loss) const {
    return options.microbatches == 1 ? loss : loss / options.microbatches;
  }

  /// The loss of all, with gradients in their places.
  [[nodiscard]] at::Tensor forward_and_backward(const std::vector<Tensors>& microbatches) {
    if (rank) {
      return rank->run(
          [&](std::int64_t stage, std::int64_t microbatch, const at::Tensor& input) {
            const auto chunk = engine ? std::optional(engine->chunk({stage, microbatch})) : std::nullopt;
            return run_part(rank->parts[stage], microbatches[microbatch].front(), input);
          },
          [&](std::int64_t stage, std::int64_t microbatch) {
            if (engine) {
              engine->backward_dw({stage, microbatch});
            }
          });
    }
    at::Tensor sum;
    for (const Tensors& windows : microbatches) {
      const at::Tensor loss = part_of_loss(windows.front());
      loss.backward();
      sum = sum.defined() ? sum + loss.detach() : loss.detach();
    }
    return sum;
  }

  /// The same, with the update behind it: one launch.
  [[nodiscard]] at::Tensor run_graph(const std::vector<Tensors>& microbatches) {
    at::Tensor sum;
    for (const Tensors& outputs : (*whole)(microbatches)) {
      sum = sum.defined() ? sum + outputs.front() : outputs.front();
    }
    return sum;
  }

  void capture(const std::vector<Tensors>& samples) {
    const auto loss = [this](torch::nn::Module&, const Tensors& windows) -> Tensors {
      return {part_of_loss(windows.front())};
    };
    whole = make_graphed_step(*engine, Callable("step", owning(loss), model.module), samples,
                              StepOptions().update([this] { optimizer.step(); }));
  }

  void set_rate() {
    const double warmup = std::min(1.0, static_cast<double>(++steps) / kWarmupSteps);
    optimizer.set_lr(kLearningRate * warmup);
  }

  TrainingOptions options;
  c10::Device device;
  TrainingMode mode;
  const TextCorpus& corpus;
  std::optional<PipelineRank> rank;
  TrainedModel model;
  Optimizer optimizer;
  WindowOrder order;
  std::int64_t steps = 0;
  std::optional<OffloadEngine> engine;  // behind the model whose calls it holds: it goes first
  std::optional<GraphedStep> whole;     ///< --graphs step, from the first step on
};

TrainingRun::TrainingRun(const TrainingOptions& options, c10::Device device, TrainingMode mode,
                         const TextCorpus& corpus, ProgressCallback progress, std::optional<PipelineRank> rank)
    : state_(std::make_unique<State>(options, device, mode, corpus, std::move(progress), std::move(rank))) {}

TrainingRun::~TrainingRun() = default;

double TrainingRun::step(const std::function<void()>& with_gradients) {
  State& run = *state_;
  const std::vector<Tensors> windows = run.next_windows();
  run.set_rate();
  at::Tensor loss;
  const auto train = [&] {
    loss = run.whole ? run.run_graph(windows) : run.forward_and_backward(windows);
    if (with_gradients) {
      with_gradients();
    }
    if (!run.whole) {
      run.optimizer.step();
      run.optimizer.zero_grad();
    }
  };
  if (run.engine) {
    if (run.mode.graphs && run.options.graphs_step() && !run.whole) {
      run.capture(windows);
    }
    auto step = run.rank ? run.engine->step(run.rank->order) : run.engine->step();
    train();
    step.finish();
  } else {
    train();
  }
  return loss.defined() ? loss.item<double>() : 0;
}

double TrainingRun::held_out_loss() {
  State& run = *state_;
  const at::NoGradGuard no_grad;
  const std::span<const std::uint8_t> text = run.corpus.held_out();
  const auto seq = static_cast<std::size_t>(run.options.shape.seq);
  const std::size_t windows =
      std::min((text.size() - 1) / seq, kHeldOutBatches * static_cast<std::size_t>(run.options.batch));
  double sum = 0;
  for (std::size_t first = 0; first < windows; first += static_cast<std::size_t>(run.options.batch)) {
    std::vector<std::size_t> offsets;
    for (std::size_t i = first; i < std::min(windows, first + static_cast<std::size_t>(run.options.batch)); ++i) {
      offsets.push_back(i * seq);
    }
    const at::Tensor loss = run.model.cross_entropy(gather(text, offsets, run.options.shape.seq + 1).to(run.device));
    sum += loss.item<double>() * static_cast<double>(offsets.size());
  }
  return sum / static_cast<double>(windows);
}

void TrainingRun::take_parameters(const TrainingRun& other) {
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> ours = state_->model.module->parameters();
  const std::vector<at::Tensor> theirs = other.state_->model.module->parameters();
  for (std::size_t i = 0; i < ours.size(); ++i) {
    ours[i].copy_(theirs[i]);
  }
}

NamedTensors TrainingRun::parameters() const { return state_->trained(); }

NamedTensors TrainingRun::gradients() const {
  NamedTensors gradients;
  for (const auto& item : state_->model.module->named_parameters()) {
    if (item.value().grad().defined()) {
      gradients.emplace_back(item.key() + ".grad", item.value().grad().clone(at::MemoryFormat::Contiguous));
    }
  }
  return gradients;
}

std::int64_t TrainingRun::parameter_count() const {
  std::int64_t count = 0;
  for (const at::Tensor& parameter : state_->model.module->parameters()) {
    count += parameter.numel();
  }
  return count;
}

OrderNumbers TrainingRun::order_numbers() const {
  if (!state_->engine) {
    return {};
  }
  Report report = state_->engine->report();
  return {report.checked_operations, std::move(report.order_findings)};
}

VerifiedNumbers TrainingRun::verified_numbers() const {
  if (!state_->engine) {
    return {};
  }
  const Report report = state_->engine->report();
  return {report.verified_forwards, report.verified_backwards, verify_tolerance(state_->options, state_->device)};
}

std::optional<SyncNumbers> TrainingRun::sync_numbers() const {
  if (!state_->engine || !state_->options.find_syncs) {
    return std::nullopt;
  }
  Report report = state_->engine->report();
  SyncNumbers numbers{report.syncs_found, report.syncs_unlisted, std::move(report.syncs), {}};
  for (const std::string& note : report.notes) {
    if (note.rfind("find_syncs", 0) == 0) {
      numbers.notes.push_back(note);
    }
  }
  return numbers;
}

Journal TrainingRun::journal() const { return state_->engine ? state_->engine->journal() : Journal{}; }

std::string TrainingRun::trace() const {
  return state_->engine && state_->engine->report().traced_step > 0 ? state_->engine->trace_json() : "";
}

std::size_t TrainingRun::write_graphs(const std::filesystem::path& folder) const {
  return state_->engine ? state_->engine->write_graphs(folder.string()).size() : 0;
}

OffloadNumbers TrainingRun::offload_numbers() const {
  if (!state_->engine) {
    return {};
  }
  const Report report = state_->engine->report();
  OffloadNumbers numbers{.bytes_per_step = report.offloaded_bytes,
                         .in_flight = report.in_flight_bytes,
                         .pinned_bytes = report.pinned_bytes,
                         .waits_per_step = report.waits,
                         .graphs = report.captures,
                         .forecast_peak = report.forecast_peak_bytes,
                         .forecast_seconds = report.forecast_seconds,
                         .notes = report.notes};
  if (state_->whole) {
    numbers.bytes_per_step = static_cast<std::int64_t>(state_->whole->offloaded_bytes());
  }
  std::map<std::string, std::int64_t> kept;
  for (const GroupReport& group : report.groups) {
    if (!group.kept_because.empty() && group.kept_because != "not selected") {
      ++kept[group.kept_because];
    }
  }
  for (const auto& [reason, groups] : kept) {
    numbers.notes.push_back(fmt::format("{} groups stay on the device, in whole or in part: {}", groups, reason));
  }
  return numbers;
}

}  // namespace sidestream::cli
