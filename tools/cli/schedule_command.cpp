#include "tools/cli/schedule_command.h"

#include <algorithm>

#include <fmt/format.h>

#include "sidestream/device.h"
#include "sidestream/error.h"
#include "tools/cli/counted.h"
#include "tools/cli/interrupt.h"
#include "tools/cli/standard_output.h"
#include "tools/cli/train_command.h"
#include "tools/cli/training_run.h"

namespace sidestream::cli {
namespace {

constexpr std::int64_t kWarmSteps = 2;  // sizing and capture
constexpr std::int64_t kProgressParts = 10;
constexpr std::size_t kShown = 6;  // of findings, and of divergences: one fault shows in many places

void validate_search(const CheckOptions& options) {
  validate(options.training);
  if (!options.training.graphed() && !options.training.offloads()) {
    throw UsageError("--graphs off with --offload off: the engine has nothing to order");
  }
  if (options.schedules && *options.schedules < 1) {
    throw UsageError(fmt::format("--schedules is {}; it must be 1 or more", *options.schedules));
  }
  if (!options.schedule.empty()) {
    if (options.schedules) {
      throw UsageError("--schedules searches many schedules, --schedule runs one again; give one of the two");
    }
    (void)Schedule::parse(options.schedule);
  }
}

/// The recorded steps, and all that must not depend on their order: each step's gradients, and the weights at the end.
void record(ScheduleCheck& check, TrainingRun& run, std::int64_t steps) {
  ScheduleCheck::Results results;
  for (std::int64_t step = 0; step < steps; ++step) {
    (void)run.step([&] {
      for (auto& [name, gradient] : run.gradients()) {
        results.emplace_back(fmt::format("{} of recorded step {}", name, step + 1), std::move(gradient));
      }
    });
  }
  for (const auto& [name, parameter] : run.parameters()) {
    results.emplace_back(name, parameter.detach());
  }
  check.stop(std::move(results));
}

int run_one(ScheduleCheck& check, const std::string& name) {
  const std::optional<Divergence> divergence = check.run(Schedule::parse(name));
  print(divergence ? divergence_words(*divergence) : fmt::format("{}: the results have the same bytes\n", name));
  return divergence ? kFailure : kSuccess;
}

int run_many(ScheduleCheck& check, std::int64_t schedules, const InterruptGuard& interrupt) {
  const std::int64_t part = std::max<std::int64_t>(schedules / kProgressParts, 100);
  const ScheduleSearch found = check.search(schedules, [&](std::int64_t tried) {
    if (tried % part == 0 && tried < schedules) {
      print(fmt::format("{} of {} schedules\n", tried, schedules));
    }
    return !interrupt.requested();
  });
  for (std::size_t i = 0; i < std::min(kShown, found.divergences.size()); ++i) {
    print(divergence_words(found.divergences[i]));
  }
  print(search_summary(found));
  if (found.diverged > 0) {
    return kFailure;
  }
  return found.tried() < schedules ? kSignalled + interrupt.signal() : kSuccess;
}

}  // namespace

std::string divergence_words(const Divergence& divergence) {
  const std::string what =
      divergence.error.empty()
          ? fmt::format("{} bytes differ, the first in {}", divergence.bytes, divergence.result)
          : fmt::format("an operator fails: {}", divergence.error.substr(0, divergence.error.find('\n')));
  return fmt::format("{}: {}\n  the order that matters: {}\n  to repeat it: the same command with --schedule {}\n",
                     divergence.schedule.name(), what, divergence.pair, divergence.schedule.name());
}

std::string search_summary(const ScheduleSearch& found) {
  return fmt::format(
      "schedules   {} tried in {:.1f} s: {} named, {} with a stream starved, {} with one piece of work held back, {} "
      "seeds\n"
      "orders      {} different ones\n"
      "divergences {}\n",
      found.tried(), found.seconds, found.named, found.starved, found.held, found.seeds, found.orders,
      found.diverged == 0
          ? std::string("none: all orders gave the same bytes")
          : fmt::format("{}, from {} pairs of operations at least", found.diverged, found.divergences.size()));
}

int check_schedules(const CheckOptions& options) {
  validate_search(options);
  const TrainingOptions& training = options.training;
  const TextCorpus corpus =
      training.text.empty() ? TextCorpus::read_default() : TextCorpus::read(training.text, "--text");
  corpus.require_windows(static_cast<std::size_t>(training.shape.seq) + 1, static_cast<std::size_t>(training.batch));
  const c10::Device device = find_device("sim");
  const TrainingMode mode{.graphs = training.graphed(), .offload = training.offloads()};
  const InterruptGuard interrupt;
  TrainingRun run(training, device, mode, corpus);
  for (std::int64_t step = 0; step < kWarmSteps; ++step) {
    (void)run.step();
  }
  ScheduleCheck check(device);
  record(check, run, training.steps);
  const OffloadNumbers numbers = run.offload_numbers();
  const std::int64_t side_streams = training.side_streams.value_or(1);
  print(fmt::format(
      "model       {}, {}, {}; {} bytes offloaded per step\nrecorded    {}: {} "
      "pieces of work on {} streams, {} bytes of gradients and weights compared\n",
      counted(training.shape.layers, "layer"), mode.name(), counted(side_streams, "side stream"),
      numbers.bytes_per_step, counted(training.steps, "step"), check.works(), check.streams(), check.result_bytes()));
  const std::vector<std::string> findings = check.findings();
  for (std::size_t i = 0; i < std::min(kShown, findings.size()); ++i) {
    print(fmt::format("not ordered: {}\n", findings[i]));
  }
  print(fmt::format("journal     {}\n",
                    findings.empty()
                        ? std::string("all conflicting accesses are ordered")
                        : fmt::format("{}{}", counted(static_cast<std::int64_t>(findings.size()), "finding"),
                                      findings.size() > kShown ? ", the first above" : "")));
  const int code =
      options.schedules ? run_many(check, *options.schedules, interrupt) : run_one(check, options.schedule);
  return code == kSuccess && !findings.empty() ? kFailure : code;
}

}  // namespace sidestream::cli
