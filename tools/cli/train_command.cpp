#include "tools/cli/train_command.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ops/equal.h>
#include <fmt/format.h>

#include "sidestream/error.h"
#include "tools/cli/device_choice.h"
#include "tools/cli/interrupt.h"
#include "tools/cli/measurement.h"
#include "tools/cli/pipeline_training.h"
#include "tools/cli/progress_line.h"
#include "tools/cli/result_files.h"
#include "tools/cli/standard_output.h"
#include "tools/cli/training_result.h"
#include "tools/cli/training_run.h"

namespace sidestream::cli {
namespace {

constexpr std::int64_t kTimedSteps = 20;  // of a mode that is measured by itself

bool equal_parameters(const TrainingRun& a, const TrainingRun& b) {
  const NamedTensors ours = a.parameters();
  const NamedTensors theirs = b.parameters();
  return std::equal(ours.begin(), ours.end(), theirs.begin(), theirs.end(), [](const auto& x, const auto& y) {
    return at::equal(x.second.detach().to(at::kCPU), y.second.detach().to(at::kCPU));
  });
}

/// The steps themselves. With --compare a second run takes the same steps in plain eager mode.
class Training {
 public:
  Training(const TrainingOptions& options, c10::Device device, const TextCorpus& corpus, TrainingMode mode,
           TrainingResult& result)
      : options_(options), device_(device), corpus_(corpus), mode_(mode), result_(result) {}

  void run(const InterruptGuard& interrupt, ResultFiles& files) {
    ProgressLine progress(stdout, "train", static_cast<std::size_t>(options_.steps),
                          static_cast<std::size_t>(options_.tokens_per_step()));
    progress.phase("making the model");
    TrainingRun main(options_, device_, mode_, corpus_, [&](const Progress& begun) { progress.phase(begun); });
    result_.parameters = main.parameter_count();
    progress.note(
        fmt::format("model: {} parameters, {}, {} layers", result_.parameters, options_.dtype, options_.shape.layers));
    if (!options_.dump_graphs.empty()) {
      (void)main.write_graphs(options_.dump_graphs);  // none yet: a folder that cannot be made is refused here
    }
    progress.phase("held-out loss before the first step");
    result_.held_out.first = main.held_out_loss();
    std::optional<TrainingRun> plain;
    std::optional<Measurement> measurement;
    if (options_.compare) {
      plain.emplace(options_, device_, TrainingMode{}, corpus_);
      result_.comparison.emplace(options_.dtype == "bfloat16" ? at::kBFloat16 : at::kFloat, options_.tokens_per_step(),
                                 !device_.is_cuda());
    } else {
      measurement.emplace(options_, device_, mode_.name());
    }
    for (std::int64_t i = 0; i < options_.steps && !interrupt.requested(); ++i) {
      double loss = 0;
      if (plain) {
        loss = compared_step(main, *plain);
      } else {
        measurement->step(main, loss);
      }
      result_.train.first = i == 0 ? loss : result_.train.first;
      result_.train.last = loss;
      result_.steps_done = i + 1;
      progress.step(static_cast<std::size_t>(i + 1), loss);
    }
    if (measurement) {
      result_.modes.push_back(measurement->finish(main));
    } else {
      result_.parameters_equal = equal_parameters(main, *plain);
    }
    result_.order = main.order_numbers();
    result_.verified = main.verified_numbers();
    result_.syncs = main.sync_numbers();
    if (files.wants_journal()) {
      files.write_journal(journal_bytes(main.journal()));
    }
    if (!options_.dump_graphs.empty()) {
      files.attempt([&] {
        progress.note(fmt::format("{} graphs were drawn into {}", main.write_graphs(options_.dump_graphs),
                                  options_.dump_graphs.string()));
      });
    }
    result_.held_out.last = main.held_out_loss();
    result_.signal = interrupt.signal();
  }

 private:
  double compared_step(TrainingRun& main, TrainingRun& plain) {
    double loss = 0;
    plain.step([&] { loss = main.step([&] { result_.comparison->compare(main.parameters(), plain.parameters()); }); });
    // Once a gradient differed, weights would drift apart and every later step would differ for that reason alone.
    if (!result_.comparison->all_equal()) {
      plain.take_parameters(main);
    }
    return loss;
  }

  const TrainingOptions& options_;
  c10::Device device_;
  const TextCorpus& corpus_;
  TrainingMode mode_;
  TrainingResult& result_;
};

/// The modes that the closing table sets side by side.
std::vector<TrainingMode> measured_modes(TrainingMode trained) {
  std::vector<TrainingMode> modes{{}};
  if (trained.graphs) {
    modes.push_back({.graphs = true});
  }
  if (trained.offload) {
    modes.push_back(trained);
  }
  return modes;
}

void measure_modes(const TrainingOptions& options, c10::Device device, const TextCorpus& corpus, TrainingMode trained,
                   const InterruptGuard& interrupt, TrainingResult& result) {
  const std::int64_t steps = Measurement::first_steps(options) + std::min(options.steps, kTimedSteps);
  TrainingOptions unchecked = options;
  unchecked.check_steps = 0;
  unchecked.verify_replays = 0;
  unsetenv("SIDESTREAM_CHECK_STEPS");  // an engine that is told 0 asks the environment
  unsetenv("SIDESTREAM_VERIFY_REPLAYS");
  for (const TrainingMode mode : measured_modes(trained)) {
    if (interrupt.requested()) {
      break;
    }
    ProgressLine progress(stdout, fmt::format("measure {}", mode.name()), static_cast<std::size_t>(steps),
                          static_cast<std::size_t>(options.tokens_per_step()));
    Measurement measurement(options, device, mode.name());
    TrainingRun run(unchecked, device, mode, corpus, [&](const Progress& begun) { progress.phase(begun); });
    for (std::int64_t i = 0; i < steps && !interrupt.requested(); ++i) {
      double loss = 0;
      measurement.step(run, loss);
      progress.step(static_cast<std::size_t>(i + 1), loss);
    }
    if (!interrupt.requested()) {
      result.modes.push_back(measurement.finish(run));
    }
  }
  result.signal = interrupt.signal();
}

}  // namespace

int train(const TrainingOptions& options) {
  validate(options);
  const TextCorpus corpus =
      options.text.empty() ? TextCorpus::read_default() : TextCorpus::read(options.text, "--text");
  corpus.require_windows(static_cast<std::size_t>(options.shape.seq) + 1, static_cast<std::size_t>(options.batch));
  if (options.pp) {
    return train_in_pipeline(options, corpus);
  }
  ResultFiles files(options);
  const ChosenDevice device = choose_device(options);

  TrainingResult result = described(options, corpus, device.name);
  const TrainingMode mode{.graphs = options.graphed(), .offload = options.offloads()};
  print(fmt::format("text: {} files, {} bytes from {}, byte entropy {:.4f} nats\ndevice: {}\n", corpus.files(),
                    corpus.bytes(), corpus.source(), result.byte_entropy, device.name));

  const InterruptGuard interrupt;
  Training(options, device.device, corpus, mode, result).run(interrupt, files);
  if (options.compare) {
    measure_modes(options, device.device, corpus, mode, interrupt, result);
  }
  print(result_table(result));
  files.write(result);
  if (result.comparison && !result.comparison->within_bound()) {
    throw Error(
        "the gradients differ from plain eager training's by more than a different order of additions explains (see "
        "the table)");
  }
  if (!result.order.findings.empty()) {
    throw Error(fmt::format("{} accesses are not ordered (see the table)", result.order.findings.size()));
  }
  return result.signal != 0 ? kSignalled + result.signal : kSuccess;
}

}  // namespace sidestream::cli
