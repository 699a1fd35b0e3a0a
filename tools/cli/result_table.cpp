#include <algorithm>
#include <functional>
#include <iterator>
#include <set>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "tools/cli/counted.h"
#include "tools/cli/interrupt.h"
#include "tools/cli/training_result.h"

namespace sidestream::cli {
namespace {

constexpr const char* kNone = "-";
constexpr std::size_t kWorstShown = 8;
constexpr std::size_t kReasonsShown = 3;

std::string mebibytes(std::int64_t bytes) { return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20)); }

std::string percent(const std::optional<double>& part) {
  return part ? fmt::format("{:.0f}%", *part * 100) : std::string(kNone);
}

void append_row(std::string& out, std::string_view name, const std::vector<std::string>& cells) {
  out += fmt::format("  {:<28}", name);
  for (const std::string& cell : cells) {
    out += fmt::format("{:>18}", cell);
  }
  out += '\n';
}

void append_modes(std::string& out, const TrainingResult& result) {
  const auto row = [&](std::string_view name, const std::function<std::string(const ModeResult&)>& cell) {
    std::vector<std::string> cells;
    std::transform(result.modes.begin(), result.modes.end(), std::back_inserter(cells), cell);
    append_row(out, name, cells);
  };
  const auto moved = [](const ModeResult& mode) { return mode.offload.bytes_per_step > 0; };
  const double tokens = static_cast<double>(result.options.tokens_per_step());
  row("", [](const ModeResult& mode) { return mode.name; });
  row("step time (median)", [](const ModeResult& mode) {
    return mode.steps > 0 ? fmt::format("{:.1f} ms", mode.step_seconds * 1e3) : kNone;
  });
  if (std::any_of(result.modes.begin(), result.modes.end(),
                  [](const ModeResult& mode) { return mode.offload.forecast_seconds > 0; })) {
    row("  forecast", [](const ModeResult& mode) {
      return mode.offload.forecast_seconds > 0 ? fmt::format("{:.1f} ms", mode.offload.forecast_seconds * 1e3) : kNone;
    });
  }
  row("tokens/s", [&](const ModeResult& mode) {
    return mode.step_seconds > 0 ? fmt::format("{:.0f}", tokens / mode.step_seconds) : std::string(kNone);
  });
  row("peak memory live", [](const ModeResult& mode) { return mode.has_peaks() ? mebibytes(mode.live) : kNone; });
  if (result.options.device_budget_mib) {
    row("  forecast", [](const ModeResult& mode) {
      return mode.offload.forecast_peak > 0 ? mebibytes(mode.offload.forecast_peak) : kNone;
    });
  }
  row("peak memory reserved",
      [](const ModeResult& mode) { return mode.has_peaks() ? mebibytes(mode.reserved) : kNone; });
  row("  in the first steps",
      [](const ModeResult& mode) { return mode.first_reserved > 0 ? mebibytes(mode.first_reserved) : kNone; });
  row("offloaded per step",
      [&](const ModeResult& mode) { return moved(mode) ? mebibytes(mode.offload.bytes_per_step) : kNone; });
  row("  on the device at the peak",
      [&](const ModeResult& mode) { return moved(mode) ? mebibytes(mode.offload.in_flight) : kNone; });
  row("device memory saved", [&](const ModeResult& mode) {
    const std::optional<std::int64_t> saved = result.saved_bytes(mode);
    return saved ? mebibytes(*saved) : kNone;
  });
  row("  of what was offloaded", [&](const ModeResult& mode) { return percent(result.gross_reduction(mode)); });
  row("pinned host memory",
      [&](const ModeResult& mode) { return moved(mode) ? mebibytes(mode.offload.pinned_bytes) : kNone; });
  row("graphs", [](const ModeResult& mode) { return mode.offload.graphs > 0 ? grouped(mode.offload.graphs) : kNone; });
  row("stream waits per step", [](const ModeResult& mode) {
    return mode.offload.waits_per_step > 0 ? grouped(mode.offload.waits_per_step) : kNone;
  });
}

/// Where offload was asked for and nothing left the device, the engine's reasons.
void append_reasons(std::string& out, const TrainingResult& result) {
  for (const ModeResult& mode : result.modes) {
    if ((result.options.pp ? result.options.offloads() : mode.name.ends_with("offload") && mode.steps > 0) &&
        mode.offload.bytes_per_step == 0) {
      out += fmt::format("  {}: nothing was offloaded\n", mode.name);
      for (std::size_t i = 0; i < mode.offload.notes.size() && i < kReasonsShown; ++i) {
        out += fmt::format("    {}\n", mode.offload.notes[i]);
      }
    }
  }
}

void append_comparison(std::string& out, const TrainingResult& result) {
  const GradientComparison& comparison = *result.comparison;
  if (comparison.all_equal()) {
    out += fmt::format("  gradients: all {} equal plain eager's bit for bit in each of {}",
                       counted(static_cast<std::int64_t>(comparison.parameters().size()), "parameter"),
                       counted(comparison.steps(), "step"));
    out += result.parameters_equal ? ", and so are the trained parameters\n" : "; THE TRAINED PARAMETERS DIFFER\n";
    return;
  }
  std::vector<GradientComparison::Parameter> worst = comparison.parameters();
  std::sort(worst.begin(), worst.end(), [](const auto& a, const auto& b) { return a.worst_error > b.worst_error; });
  const auto differing = std::count_if(worst.begin(), worst.end(), [](const auto& p) { return p.differing_steps > 0; });
  out += fmt::format("  gradients: {} of {} differ from plain eager's in some of {}, {}\n", differing,
                     counted(static_cast<std::int64_t>(worst.size()), "parameter"), counted(comparison.steps(), "step"),
                     comparison.within_bound() ? "all within the bound" : "SOME BEYOND THE BOUND");
  out += fmt::format("    {:<30}{:>12}{:>14}{:>12}\n", "parameter", "steps", "worst error", "bound");
  for (std::size_t i = 0; i < worst.size() && i < kWorstShown && worst[i].differing_steps > 0; ++i) {
    out += fmt::format("    {:<30}{:>12}{:>14.2e}{:>12.2e}\n", worst[i].name, worst[i].differing_steps,
                       worst[i].worst_error, comparison.bound());
  }
  out += comparison.bound() > 0
             ? fmt::format("    {}\n", comparison.explanation())
             : std::string("    the same operators ran on the same bytes, so the gradients must be equal\n");
}

/// What made the host wait, with the innermost frames, and the remedy once for each kind.
void append_syncs(std::string& out, const SyncNumbers& syncs) {
  constexpr std::size_t kFrames = 6;
  out += syncs.found == 0 ? fmt::format("\n  syncs: nothing made the host wait in a step{}\n",
                                        syncs.notes.empty() ? "" : ", as far as that could be observed")
                          : fmt::format("\n  syncs: the host waited {} in steps, at {}{}\n",
                                        counted(syncs.found, "time"), syncs.unlisted > 0 ? "more than " : "",
                                        counted(static_cast<std::int64_t>(syncs.places.size()), "place"));
  for (const std::string& note : syncs.notes) {
    out += fmt::format("    note: {}\n", note);
  }
  std::set<std::string> advised;
  for (const SyncFinding& sync : syncs.places) {
    out += fmt::format("    {} {}: {}, {}{}{}\n", counted(sync.count, "time"), sync.kind, sync.operation,
                       sync.call.empty() ? std::string("between calls") : "in " + sync.call,
                       sync.scope.empty() || sync.scope == sync.call ? std::string() : ", scope " + sync.scope,
                       sync.node.empty() ? std::string() : ", backward of " + sync.node);
    for (std::size_t i = 0; i < std::min(kFrames, sync.stack.size()); ++i) {
      out += fmt::format("      at {}\n", sync.stack[i]);
    }
    if (advised.insert(sync.remedy).second) {
      out += fmt::format("      instead: {}\n", sync.remedy);
    }
  }
}

}  // namespace

const ModeResult* TrainingResult::find(const std::string& name) const noexcept {
  const auto found =
      std::find_if(modes.begin(), modes.end(), [&](const ModeResult& mode) { return mode.name == name; });
  return found == modes.end() ? nullptr : &*found;
}

std::optional<std::int64_t> TrainingResult::saved_bytes(const ModeResult& mode) const {
  const ModeResult* without = find(mode.name == "graphs+offload" ? "graphs" : "eager");
  if (mode.offload.bytes_per_step <= 0 || without == nullptr || !mode.has_peaks() || !without->has_peaks()) {
    return std::nullopt;
  }
  return without->live - mode.live;
}

std::optional<double> TrainingResult::reduction(const ModeResult& mode, std::int64_t bytes) const {
  const std::optional<std::int64_t> saved = saved_bytes(mode);
  if (bytes <= 0 || !saved) {
    return std::nullopt;
  }
  return static_cast<double>(*saved) / static_cast<double>(bytes);
}

std::optional<double> TrainingResult::gross_reduction(const ModeResult& mode) const {
  return reduction(mode, mode.offload.bytes_per_step);
}

std::optional<double> TrainingResult::net_reduction(const ModeResult& mode) const {
  return reduction(mode, mode.offload.bytes_per_step - mode.offload.in_flight);
}

std::string result_table(const TrainingResult& result) {
  const TrainingOptions& options = result.options;
  std::string out;
  const std::string ranks =
      options.pp
          ? fmt::format(", {}{}: {}, {}", options.delay_weight_gradients ? "zero-bubble, " : "",
                        options.vpp > 1 ? fmt::format("interleaved with {} virtual stages", options.vpp) : "1F1B",
                        counted(*options.pp, "rank"), counted(options.microbatches, "microbatch"))
          : std::string();
  out += fmt::format("\n  {} of {} of {} bytes on {}, {}{}{}\n\n", grouped(result.steps_done),
                     counted(options.steps, "step"), grouped(options.tokens_per_step()), result.device_name,
                     result.mode, ranks,
                     result.signal != 0 ? fmt::format(" (ended by {})", signal_words(result.signal)) : std::string());
  append_row(out, "loss, nats per byte", {"first", "last"});
  const auto of_steps = [&](double loss) { return result.steps_done > 0 ? fmt::format("{:.4f}", loss) : kNone; };
  append_row(out, "  train", {of_steps(result.train.first), of_steps(result.train.last)});
  if (!options.pp) {
    append_row(out, "  held out",
               {fmt::format("{:.4f}", result.held_out.first), fmt::format("{:.4f}", result.held_out.last)});
    out += fmt::format("  entropy of the text's bytes {:.4f}: the held-out loss is {:.4f} {} it\n", result.byte_entropy,
                       std::abs(result.byte_entropy - result.held_out.last),
                       result.held_out.last < result.byte_entropy ? "below" : "above");
  }
  if (!result.modes.empty()) {
    out += '\n';
    append_modes(out, result);
    append_reasons(out, result);
  }
  if (result.comparison && result.comparison->steps() > 0) {
    out += '\n';
    append_comparison(out, result);
  }
  if (result.order.operations > 0) {
    out += fmt::format("\n  order: {} of the first {}, {}\n", counted(result.order.operations, "operation"),
                       counted(std::min(options.check_steps, result.steps_done), "step"),
                       result.order.findings.empty() ? std::string("all conflicting accesses are ordered")
                                                     : fmt::format("FINDINGS: {}", result.order.findings.size()));
    for (const std::string& finding : result.order.findings) {
      out += fmt::format("    {}\n", finding);
    }
  }
  if (result.verified.forwards > 0) {
    out += fmt::format("\n  verified: {} compared with eager runs, {} of them with gradients: all equal {}\n",
                       counted(result.verified.forwards, "replay"), grouped(result.verified.backwards),
                       result.verified.tolerance > 0
                           ? fmt::format("within {:.1e} of the largest magnitude", result.verified.tolerance)
                           : std::string("bit for bit"));
  }
  if (result.syncs) {
    append_syncs(out, *result.syncs);
  }
  return out;
}

}  // namespace sidestream::cli
